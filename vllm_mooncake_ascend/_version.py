"""The version of the package, read by the build and by `vllm-mooncake-ascend --version`."""

__version__ = "0.1.0"
