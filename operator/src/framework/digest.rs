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

#[cfg(test)]
mod tests {
    #[test]
    fn formats_digest_with_algorithm_prefix() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(super::of(""), empty);
    }
}
