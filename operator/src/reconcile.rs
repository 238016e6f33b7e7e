//! Reconcilers, one for each kind, and the parts that they share: stores, the assignment of nodes, and connections to
//! control planes.

pub mod allocation;
pub mod assignment;
pub mod authority;
pub mod cluster;
pub mod context;
pub mod control_plane;
pub mod membership;
pub mod names;
pub mod node;
pub mod orphans;
pub mod pool;
pub mod profile;
mod salts;
pub mod secrets;
pub mod selection;
pub mod stores;
pub mod tenant;
#[cfg(test)]
pub(crate) mod test_objects;
pub mod watches;
