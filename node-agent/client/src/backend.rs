//! The statement of what moves the blocks of a session's extents.

use reprise_policy::session::TransferBackend;
use reprise_proto::local::{self, request, response};

use crate::client::Client;
use crate::error::ClientError;

impl Client {
    /// States what moves the blocks of the session's extents from now on. The agent's metrics and status name it;
    /// nothing else depends on it. Without a statement, the agent reports that blocks take the arena.
    ///
    /// # Errors
    /// `Timeout`, `AgentLost`.
    pub fn use_backend(&self, backend: TransferBackend) -> Result<(), ClientError> {
        let body = request::Body::UseBackend(local::UseBackend { backend: backend.number().into() });
        match self.session().call("use backend", body)? {
            response::Body::BackendUsed(local::BackendUsed {}) => Ok(()),
            _ => Err(self.session().broken(ClientError::unexpected("use backend"))),
        }
    }
}
