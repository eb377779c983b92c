"""From a dataset to what others read: their file formats, and the hub."""
