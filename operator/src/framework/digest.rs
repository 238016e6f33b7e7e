//! Digests in the format of the resources: `sha256:` and 64 hexadecimal digits.

use sha2::{Digest as _, Sha256};

/// Returns the digest of a text.
pub fn of(text: &str) -> String {
    let mut written = "sha256:".to_owned();
    for byte in Sha256::digest(text.as_bytes()) {
        written.push_str(&format!("{byte:02x}"));
    }
    written
}
