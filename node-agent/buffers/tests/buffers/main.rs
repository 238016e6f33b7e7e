//! Tests of memory through its public interface: arenas, copies with checksums, descriptors over a socket,
//! memory of other processes.

mod arena;
mod copies;
mod descriptors;
mod mapped;
