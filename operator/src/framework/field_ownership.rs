//! Server-side apply to objects that other writers change as well.
//!
//! * [`restore`] writes fields again that only the operator owns, at a bounded rate.
//! * [`extra_fields`] removes entries that another writer added to such objects.

pub(crate) mod extra_fields;
pub(crate) mod restore;
