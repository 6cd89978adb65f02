"""Sweeps of a few small cases, as YAML."""

STREAM = """
family: tiny
ops: [stream]
defaults: {dtype: int32}
check:
  - {name: odd, read: 4004, write: 4004}
  - {name: even, read: 16384, write: 16384}
bench:
  - {name: big, read: 1048576, write: 1048576}
"""
RMSNORM = """
family: norm
ops: [rmsnorm_fwd, rmsnorm_bwd]
defaults: {dtype: float32, zero_centered: false}
check:
  - {name: small, M: 3, N: 40, quant: none}
  - {name: none, M: 0, N: 64, quant: none}
bench:
  - {name: big, M: 64, N: 64}
"""
