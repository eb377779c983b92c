"""From a plan to a dataset: windows run by engines, the output directory, the commit."""
