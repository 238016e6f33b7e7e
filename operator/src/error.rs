//! Why a reconcile did not come to its end. All of it is tried again with a growing delay; what somebody must act on is a
//! condition, not an error.

/// An error of the operator.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The API server did not do what it was asked for.
    #[error("{what}: {source}")]
    Api {
        /// What was asked.
        what: String,
        /// What it said.
        #[source]
        source: kube::Error,
    },
    /// A certificate could not be made.
    #[error("a certificate cannot be made: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The lease is another replica's.
    #[error("another replica holds the lease, so nothing is granted any more")]
    LeaseLost,
    /// Somebody did not answer.
    #[error("not ended within {0:?}")]
    Late(std::time::Duration),
}

impl OperatorError {
    /// Says what was asked of the API server.
    pub fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> OperatorError {
        let what = what.into();
        move |source| OperatorError::Api { what, source }
    }

    /// What the API server said of its refusal, or all that is known.
    pub fn words(&self) -> String {
        match self {
            OperatorError::Api { source: kube::Error::Api(status), .. } => status.message.clone(),
            other => other.to_string(),
        }
    }

    /// The code with which the API server refused, if it did.
    pub fn code(&self) -> Option<u16> {
        match self {
            OperatorError::Api { source: kube::Error::Api(status), .. } => Some(status.code),
            _ => None,
        }
    }
}
