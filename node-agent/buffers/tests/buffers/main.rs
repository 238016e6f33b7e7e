//! Tests of memory through its public interface: arenas, copies with checksums, descriptors over a socket.

mod arena;
mod copies;
mod descriptors;
