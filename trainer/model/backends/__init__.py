"""The kernels that can attend over packed rows, and the choice among them."""
