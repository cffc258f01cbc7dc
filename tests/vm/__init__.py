"""The kernel's RDMA on a machine that has none: a stock Debian kernel under QEMU, with rxe and siw devices in it."""
