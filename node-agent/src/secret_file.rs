//! Files of secrets: 64 hexadecimal digits in a line, readable by their owner and group only.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use reprise_policy::TenantSalt;

/// Bytes of a line: 64 digits, and white space. A longer one is not a secret.
const LINE_BYTES_MAX: u64 = 128;

/// Permissions that must not be set: others may not read it, and only its owner may write it. The group may read it,
/// because Kubernetes gives files of Secrets to the group of a pod.
const FORBIDDEN_MODE: u32 = 0o037;

/// Bytes of a secret.
pub(crate) type Secret = [u8; TenantSalt::SIZE];

/// Reason why a file has no usable secret, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SecretError {
    /// The file does not exist.
    #[error("the file does not exist")]
    Missing,
    /// The file must be corrected.
    #[error("{0}")]
    Unusable(String),
}

/// Reads the secrets of a file, from 1 to `secrets_max`.
///
/// # Errors
/// [`SecretError`].
pub(crate) fn read(path: &Path, secrets_max: usize) -> Result<Vec<Secret>, SecretError> {
    read_marked(path, secrets_max, None).map(|(secrets, _)| secrets)
}

/// Reads the secrets of a file, and whether it also has this word.
///
/// # Errors
/// [`SecretError`].
pub(crate) fn read_marked(
    path: &Path,
    secrets_max: usize,
    word: Option<&str>,
) -> Result<(Vec<Secret>, bool), SecretError> {
    let unusable = |words: String| Err(SecretError::Unusable(words));
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(SecretError::Missing),
        Err(error) => return unusable(format!("{error}: make it readable for the agent's user")),
    };
    let mode = match file.metadata() {
        Ok(metadata) if metadata.is_file() => metadata.mode() & 0o777,
        Ok(_) => return unusable("it is not a regular file".to_owned()),
        Err(error) => return unusable(error.to_string()),
    };
    if mode & FORBIDDEN_MODE != 0 {
        return unusable(format!("its mode is {mode:04o}, so other users can access it: run `chmod 600`"));
    }
    let mut text = String::new();
    if let Err(error) = file.take(LINE_BYTES_MAX * secrets_max as u64).read_to_string(&mut text) {
        return unusable(error.to_string());
    }
    let (marks, lines): (Vec<&str>, Vec<&str>) =
        text.split_whitespace().partition(|line| Some(*line) == word);
    let secrets: Option<Vec<Secret>> =
        lines.into_iter().map(|line| TenantSalt::from_hex(line).map(|secret| *secret.secret())).collect();
    match secrets {
        Some(secrets) if (1..=secrets_max).contains(&secrets.len()) => Ok((secrets, !marks.is_empty())),
        _ => unusable(format!(
            "it does not have 64 hexadecimal digits in each of 1 to {secrets_max} lines: copy the file from another \
             node, or remove it and create a new one"
        )),
    }
}
