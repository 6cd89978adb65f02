"""Facts about kernels that nobody times, from compiler and profiler: registers, spills, occupancy, access widths, counters."""
