//! Python exceptions, one for each kind of client error.

use pyo3::exceptions::PyException;
use pyo3::{PyErr, create_exception};
use reprise_client::ClientError;

create_exception!(
    reprise,
    RepriseError,
    PyException,
    "Base class of Reprise's errors. Each subclass has its own remedy."
);
create_exception!(
    reprise,
    AgentAbsent,
    RepriseError,
    "No agent listens on the socket: start the agent, or correct the path."
);
create_exception!(
    reprise,
    Forbidden,
    RepriseError,
    "This user has no permission to open the agent's socket."
);
create_exception!(
    reprise,
    AgentLost,
    RepriseError,
    "The session ended and pending calls failed: connect again."
);
create_exception!(
    reprise,
    Timeout,
    RepriseError,
    "The agent did not answer in time. The session remains usable."
);
create_exception!(
    reprise,
    Stalled,
    RepriseError,
    "A transfer made no progress although the agent answers, because a device or another node hangs: recompute the missing blocks."
);
create_exception!(
    reprise,
    LimitReached,
    RepriseError,
    "The limit of a wait has passed: compute the missing blocks."
);
create_exception!(reprise, BadRequest, RepriseError, "The call has an invalid argument: correct it.");
create_exception!(
    reprise,
    Version,
    RepriseError,
    "The versions of client and agent are incompatible: update the older one."
);
create_exception!(reprise, Busy, RepriseError, "The agent is at a limit or has no space: try again later.");
create_exception!(
    reprise,
    Internal,
    RepriseError,
    "The agent has an internal error: report it with the agent's log."
);
create_exception!(
    reprise,
    Protocol,
    RepriseError,
    "The agent violated the protocol and the session ended: report it."
);
create_exception!(reprise, Memory, RepriseError, "Shared memory of the agent cannot be mapped or accessed.");

/// Converts an error to its exception; the message includes the causes.
pub(crate) fn exception(error: &ClientError) -> PyErr {
    let words = message(error);
    match error {
        ClientError::AgentAbsent { .. } => AgentAbsent::new_err(words),
        ClientError::Forbidden { .. } => Forbidden::new_err(words),
        ClientError::AgentLost { .. } => AgentLost::new_err(words),
        ClientError::Timeout { .. } => Timeout::new_err(words),
        ClientError::Stalled { .. } => Stalled::new_err(words),
        ClientError::LimitReached { .. } => LimitReached::new_err(words),
        ClientError::BadRequest(_) => BadRequest::new_err(words),
        ClientError::Version(_) => Version::new_err(words),
        ClientError::Busy(_) => Busy::new_err(words),
        ClientError::Internal(_) => Internal::new_err(words),
        ClientError::Protocol(_) => Protocol::new_err(words),
        ClientError::Memory { .. } => Memory::new_err(words),
        _ => RepriseError::new_err(words),
    }
}

/// Returns the message of an error and its causes.
pub(crate) fn message(error: &ClientError) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}
