// All code for GPUs, as one unit: `build.rs` compiles it to a fat binary.
#include "copy.cuh"
#include "index_kernel.cuh"
#include "layer.cuh"
#include "ring_kernel.cuh"
