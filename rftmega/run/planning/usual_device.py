"""The device that plans assume where nobody says another: an H100 of 80 GB with NVLink and a network
card of 400 Gb/s. Imports nothing, since `--help` prints it.
"""

RESERVED_GB = 4.0  # of each device that is nobody's
TFLOPS = 989.0  # dense, in bfloat16
HBM_GBS = 3350.0  # GB/s of its memory
NVLINK_GBS = 450.0  # GB/s within a node, one way
NIC_GBS = 50.0  # GB/s between nodes, one way
PCIE_GBS = 50.0  # GB/s to its host, one way
