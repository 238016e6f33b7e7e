//! Profiles of hardware and models in files of users.

use anyhow::Context;
use reprise_simulator::serving::profiles::ProfileFiles;

/// Reads the files that expressions of hardware and names of models name.
pub(crate) fn read(expressions: &[&str]) -> anyhow::Result<ProfileFiles> {
    let mut files = ProfileFiles::default();
    for path in expressions.iter().flat_map(|expression| ProfileFiles::paths(expression)) {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!("cannot read the profile {path}: name a file, or a built-in profile without slashes")
        })?;
        files.add(path, text);
    }
    Ok(files)
}
