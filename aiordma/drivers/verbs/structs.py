"""Structs of <infiniband/verbs.h> and <rdma/rdma_cma.h>, what of them is used here, as ctypes has them.

Their layout is part of libibverbs' and librdmacm's ABI; tests compare it with the headers.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

__all__ = [
    "CMID",
    "CMConnParam",
    "CMEventChannel",
    "CMEventStruct",
    "IbvAHAttr",
    "IbvContext",
    "IbvDevice",
    "IbvDeviceAttr",
    "IbvGlobalRoute",
    "IbvQPAttr",
    "IbvQPCap",
]


class IbvGlobalRoute(ctypes.Structure):
    """struct ibv_global_route."""

    _fields_ = [
        ("dgid", c_uint8 * 16),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
        ("_gid_alignment", c_uint64 * 0),
    ]


class IbvAHAttr(ctypes.Structure):
    """struct ibv_ah_attr."""

    _fields_ = [
        ("grh", IbvGlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    ]


class IbvQPCap(ctypes.Structure):
    """struct ibv_qp_cap."""

    _fields_ = [
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    ]


class IbvQPAttr(ctypes.Structure):
    """struct ibv_qp_attr."""

    _fields_ = [
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32),
        ("cap", IbvQPCap),
        ("ah_attr", IbvAHAttr),
        ("alt_ah_attr", IbvAHAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    ]


class IbvDeviceAttr(ctypes.Structure):
    """struct ibv_device_attr; what nobody here reads is under one name."""

    _fields_ = [
        ("fw_ver", c_char * 64),
        ("_guids_and_sizes", c_uint64 * 4),
        ("_vendor_to_max_pd", c_uint32 * 12),
        ("max_qp_rd_atom", c_int),
        ("max_ee_rd_atom", c_int),
        ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int),
        ("_max_ee_init_rd_atom_to_max_srq_sge", c_uint32 * 16),
        ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8),
        ("phys_port_cnt", c_uint8),
    ]


class IbvDevice(ctypes.Structure):
    """struct ibv_device, its first fields."""

    _fields_ = [("_ops", c_void_p * 2), ("node_type", c_int), ("transport_type", c_int)]


class IbvContext(ctypes.Structure):
    """struct ibv_context, up to its descriptors; between are 32 pointers to functions."""

    _fields_ = [("device", c_void_p), ("_ops", c_void_p * 32), ("cmd_fd", c_int), ("async_fd", c_int)]


class CMEventChannel(ctypes.Structure):
    """struct rdma_event_channel."""

    _fields_ = [("fd", c_int)]


class CMID(ctypes.Structure):
    """struct rdma_cm_id, up to the addresses, which begin its struct rdma_route."""

    _fields_ = [
        ("verbs", c_void_p),
        ("channel", c_void_p),
        ("context", c_void_p),
        ("qp", c_void_p),
        ("src_addr", c_uint8 * 128),
        ("dst_addr", c_uint8 * 128),
    ]


class CMConnParam(ctypes.Structure):
    """struct rdma_conn_param."""

    _fields_ = [
        ("private_data", c_void_p),
        ("private_data_len", c_uint8),
        ("responder_resources", c_uint8),
        ("initiator_depth", c_uint8),
        ("flow_control", c_uint8),
        ("retry_count", c_uint8),
        ("rnr_retry_count", c_uint8),
        ("srq", c_uint8),
        ("qp_num", c_uint32),
    ]


class CMEventStruct(ctypes.Structure):
    """struct rdma_cm_event, of its parameters those of a connection."""

    _fields_ = [
        ("id", c_void_p),
        ("listen_id", c_void_p),
        ("event", c_int),
        ("status", c_int),
        ("conn", CMConnParam),
    ]
