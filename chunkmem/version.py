"""The version, which `chunkmem.__version__`, the command line and what is built of the package share."""

__version__ = "0.1.0"
