//! Errors that end a reconcile. All of them are retried with a growing delay. A state that requires action by
//! a user is a condition, not an error.

use std::time::Duration;

/// HTTP status codes: a missing permission, a missing object, and a write that another one overtook.
pub(crate) const FORBIDDEN: u16 = 403;
pub(crate) const NOT_FOUND: u16 = 404;
pub(crate) const CONFLICT: u16 = 409;

/// An error that ends a reconcile.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// A request to the API server failed.
    #[error("{what}: {source}")]
    Api {
        /// The operation, like `apply ConfigMap c`.
        what: String,
        /// The answer or transport error.
        #[source]
        source: kube::Error,
    },
    /// The certificate of a process cannot be issued.
    #[error("cannot issue a certificate: {0}")]
    Identity(String),
    /// Another replica holds the lease.
    #[error("another replica holds the lease; not granting GPU queues")]
    LeaseLost,
    /// An operation exceeded its time limit.
    #[error("timed out after {0:?}")]
    Timeout(Duration),
}

/// Runs an operation with a time limit.
pub(crate) async fn within<T>(
    limit: Duration,
    operation: impl Future<Output = Result<T, OperatorError>>,
) -> Result<T, OperatorError> {
    tokio::time::timeout(limit, operation).await.unwrap_or(Err(OperatorError::Timeout(limit)))
}

impl OperatorError {
    /// Returns a constructor of [`OperatorError::Api`] for an operation, to use with `map_err`.
    pub fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> OperatorError {
        let what = what.into();
        move |source| OperatorError::Api { what, source }
    }

    /// Returns the API server's message if it rejected the request, otherwise the whole error.
    pub fn message(&self) -> String {
        match self {
            OperatorError::Api { source: kube::Error::Api(status), .. } => status.message.clone(),
            other => other.to_string(),
        }
    }

    /// Returns the HTTP status code if the API server rejected the request.
    pub fn code(&self) -> Option<u16> {
        match self {
            OperatorError::Api { source: kube::Error::Api(status), .. } => Some(status.code),
            _ => None,
        }
    }
}
