"""RDMA devices of the kernel, through pyverbs and librdmacm."""
