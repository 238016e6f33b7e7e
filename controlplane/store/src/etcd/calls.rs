//! Deadline and error translation of a call to etcd.

use std::error::Error;
use std::time::Duration;

use etcd_client::Error as EtcdError;
use tokio::time::timeout;

use crate::contract::Revision;
use crate::error::StoreError;

/// Deadline of a call; an election of etcd takes about a second.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of sources of an error to include in its message.
const CHAIN_MAX: usize = 8;

/// gRPC status codes that etcd uses.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const FAILED_PRECONDITION: i32 = 9;
const OUT_OF_RANGE: i32 = 11;
const UNAUTHENTICATED: i32 = 16;

/// Message of the client for a keep-alive to which etcd replied without a time to live.
const LEASE_NOT_FOUND: &str = "lease not found";

/// Runs a call with the deadline, and translates its errors.
pub(super) async fn within<T>(call: impl Future<Output = Result<T, EtcdError>>) -> Result<T, StoreError> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(translate(&error)),
        Err(_) => Err(unavailable(&format!("no answer within {CALL_TIMEOUT:?}"))),
    }
}

fn translate(error: &EtcdError) -> StoreError {
    match error {
        EtcdError::InvalidArgs(_) | EtcdError::InvalidUri(_) => StoreError::Invalid(error.to_string()),
        EtcdError::LeaseKeepAliveError(reason) if reason == LEASE_NOT_FOUND => StoreError::LeaseGone,
        EtcdError::GRpcStatus(status) => {
            let text = status.message();
            match status.code() as i32 {
                // etcd does not report the oldest revision. Reading the range again yields a later one.
                OUT_OF_RANGE if text.contains("compacted") => StoreError::Compacted { oldest: Revision(0) },
                NOT_FOUND if text.contains("lease not found") => StoreError::LeaseGone,
                code if is_denial(code, text) => denied(text),
                _ => transport(&chain(text, status.source())),
            }
        }
        EtcdError::TransportError(error) => transport(&chain(&error.to_string(), error.source())),
        other => unavailable(&other.to_string()),
    }
}

/// Whether etcd rejected the user.
fn is_denial(code: i32, text: &str) -> bool {
    match code {
        PERMISSION_DENIED | UNAUTHENTICATED => true,
        // Wrong password, call without a user, or a user although authentication is disabled.
        INVALID_ARGUMENT => text.contains("authentication failed") || text.contains("user name is empty"),
        FAILED_PRECONDITION => text.contains("authentication is not enabled"),
        _ => false,
    }
}

/// Error of a call without a reply: no connection, or an untrusted certificate.
fn transport(reason: &str) -> StoreError {
    match ["peer certificate", "fatal alert"].iter().any(|words| reason.contains(words)) {
        true => StoreError::Untrusted { reason: reason.to_owned() },
        false => unavailable(reason),
    }
}

/// Joins the messages of an error and its sources, without repetitions.
fn chain(text: &str, mut source: Option<&(dyn Error + 'static)>) -> String {
    let mut message = text.to_owned();
    for _ in 0..CHAIN_MAX {
        let Some(error) = source else { break };
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        source = error.source();
    }
    message
}

pub(super) fn denied(reason: &str) -> StoreError {
    StoreError::Denied { reason: reason.to_owned() }
}

pub(super) fn unavailable(reason: &str) -> StoreError {
    StoreError::Unavailable { reason: reason.to_owned() }
}

pub(super) fn revision(number: i64) -> Revision {
    Revision(u64::try_from(number).unwrap_or(0))
}

/// Converts a number to etcd's signed type; larger ones are clamped.
pub(super) fn wire(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
