//! Files of slack profiles, in the JSON form that the operator writes and `reprise profile --output` stores.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use reprise_policy::slack::{Content, Profile};

/// Maximum size of a profile: 256 windows of 200 bytes, 128 kernel times and four short texts.
pub(crate) const FILE_BYTES_MAX: u64 = 256 << 10;

/// Reads the text of a profile.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("the file exceeds {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// Parses and validates the text of a profile.
///
/// # Errors
/// The reason why the text is not a valid profile.
pub(crate) fn parse(text: &[u8]) -> Result<Profile, String> {
    let content: Content = serde_json::from_slice(text)
        .map_err(|error| format!("this version of the agent cannot parse it: {error}"))?;
    Profile::new(content).map_err(|error| error.to_string())
}
