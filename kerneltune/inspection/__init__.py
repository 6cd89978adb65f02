"""What a compiler and a profiler say of kernels that nobody times: registers, spills, occupancy, access widths, counters."""
