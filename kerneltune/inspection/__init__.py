"""Show facts of kernels from compiler and profiler: registers, spills, occupancy, access widths, counters; time nothing."""
