"""Benchmarks on an RDMA device of the kernel: `python -m benchmarks.rdma --json FILE`, `make bench-rdma` in a guest."""
