"""What a machine with one NVIDIA GPU is to show: `python -m benchmarks.gpu_check`, or `make gpu-check`."""
