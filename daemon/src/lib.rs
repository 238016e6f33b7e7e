//! Infrastructure that agent, control-plane member and operator share.
//!
//! * [`descriptors`]: the limit on open files, raised at start and divided among listeners.
//! * [`certificates`]: certificates in use: followed files, metrics of their ends.
//! * [`connections`]: connection limits of listeners; the longest-idle connection is closed for a new one.
//! * [`exposition`]: formats of `/metrics`.
//! * [`guard`]: which clients see which pages of the admin port.
//! * [`http`]: HTTP server of the admin port.
//! * [`log`]: logging to standard error, with a rate limit for repeated conditions.
//! * [`rejected_connections`]: metric of connections closed without service.
//! * [`scrapers`]: bearer tokens that may read metrics.
//!
//! The contents of pages and the metrics are the callers'.

pub mod certificates;
pub mod connections;
pub mod descriptors;
pub mod exposition;
pub mod guard;
pub mod http;
pub mod log;
pub mod rejected_connections;
pub mod scrapers;
