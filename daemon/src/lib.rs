//! What agent, control-plane member and operator share as processes.
//!
//! * [`descriptors`]: the limit on open files, raised at start and divided among listeners.
//! * [`connections`]: a bound on the connections of a listener, which closes the longest-idle one for a new one.
//! * [`exposition`]: the formats of `/metrics`.
//! * [`http`]: the admin port's server, on such a bound.
//! * [`log`]: the log, in which a condition that repeats takes one line and then a count.
//! * [`rejected`]: the metric of connections that were not served.
//!
//! Deliberately absent: what the pages show, what is measured, who may connect.

pub mod connections;
pub mod descriptors;
pub mod exposition;
pub mod http;
pub mod log;
pub mod rejected;
