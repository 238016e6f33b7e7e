//! Service account token of a pod, by which an agent in Kubernetes checks the tenant of its sessions.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::ClientError;

/// Size limit of a token file; a token is one to two KiB of text.
const TOKEN_BYTES_MAX: u64 = 8 << 10;

/// Reads the current token of this pod.
pub(crate) fn read_token(path: &Path) -> Result<String, ClientError> {
    let refuse = |what: String| {
        ClientError::BadRequest(format!("the service account token {}: {what}", path.display()))
    };
    let mut token = String::new();
    let read = File::open(path).and_then(|file| file.take(TOKEN_BYTES_MAX + 1).read_to_string(&mut token));
    read.map_err(|error| {
        refuse(format!("cannot read the file: {error}; mount it, or configure another path"))
    })?;
    if token.len() as u64 > TOKEN_BYTES_MAX {
        return Err(refuse(format!("the file exceeds {TOKEN_BYTES_MAX} bytes: not a token")));
    }
    Ok(token.trim().to_owned())
}
