//! The custom resources of Reprise.

/// The API group of all kinds.
pub const GROUP: &str = "reprise.dev";
