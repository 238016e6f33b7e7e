//! One exception for each kind of the client's errors.

use pyo3::exceptions::PyException;
use pyo3::{PyErr, create_exception};
use reprise_client::ClientError;

create_exception!(
    reprise,
    RepriseError,
    PyException,
    "Why a call did not do what was asked. Its subclasses say what to do."
);
create_exception!(
    reprise,
    AgentAbsent,
    RepriseError,
    "Nobody listens at the socket: start the agent, or correct the path."
);
create_exception!(reprise, Forbidden, RepriseError, "This user may not open the agent's socket.");
create_exception!(
    reprise,
    AgentLost,
    RepriseError,
    "The session is over: what is in flight is missed; connect again."
);
create_exception!(reprise, Timeout, RepriseError, "No answer in time. The session goes on.");
create_exception!(
    reprise,
    Stalled,
    RepriseError,
    "Nothing came although the agent answers: another node or a device hangs. Recompute what is missing."
);
create_exception!(reprise, BadRequest, RepriseError, "The call was wrong: correct it.");
create_exception!(
    reprise,
    Version,
    RepriseError,
    "Client and agent do not fit together: update the older one."
);
create_exception!(reprise, Busy, RepriseError, "Too much at once, or no room: try again later.");
create_exception!(reprise, Internal, RepriseError, "The agent has a fault: report it, with the agent's log.");
create_exception!(
    reprise,
    Protocol,
    RepriseError,
    "The agent broke the protocol; the session is over. Report it."
);
create_exception!(
    reprise,
    Memory,
    RepriseError,
    "Memory that the agent granted could not be mapped or reached."
);

/// The exception of an error, with its words and those of its causes.
pub(crate) fn raised(error: &ClientError) -> PyErr {
    let words = described(error);
    match error {
        ClientError::AgentAbsent { .. } => AgentAbsent::new_err(words),
        ClientError::Forbidden { .. } => Forbidden::new_err(words),
        ClientError::AgentLost { .. } => AgentLost::new_err(words),
        ClientError::Timeout { .. } => Timeout::new_err(words),
        ClientError::Stalled { .. } => Stalled::new_err(words),
        ClientError::BadRequest(_) => BadRequest::new_err(words),
        ClientError::Version(_) => Version::new_err(words),
        ClientError::Busy(_) => Busy::new_err(words),
        ClientError::Internal(_) => Internal::new_err(words),
        ClientError::Protocol(_) => Protocol::new_err(words),
        ClientError::Memory { .. } => Memory::new_err(words),
        _ => RepriseError::new_err(words),
    }
}

/// An error in words, with its causes.
pub(crate) fn described(error: &ClientError) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}
