//! Paths of blocks between the KV memory of an engine and its node.

use std::fmt;
use std::str::FromStr;

use anyhow::ensure;

/// Error of a build without rings.
pub(super) const NOT_BUILT: &str = "this program was built without rings: build it with its default features, which \
                                    need a C++ compiler (`make demo ENGINE_PATH=rings`, or `make build`)";

/// Path of blocks between the KV memory of an engine and its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnginePath {
    /// Copies between KV memory and the agent's arena.
    #[default]
    Arena,
    /// Rings between registered KV memory and extents of the node's devices. Blocks that rings cannot reach take the
    /// arena: those in DRAM and those of other nodes.
    Rings,
}

impl EnginePath {
    /// Names of all paths.
    pub const NAMES: [&str; 2] = ["arena", "rings"];

    /// Checks that this build has the path.
    ///
    /// # Errors
    /// The build lacks rings; the error has the remedy.
    pub fn ensure_built(self) -> anyhow::Result<()> {
        ensure!(self == EnginePath::Arena || cfg!(feature = "rings"), "{NOT_BUILT}");
        Ok(())
    }
}

impl fmt::Display for EnginePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EnginePath::NAMES[*self as usize])
    }
}

impl FromStr for EnginePath {
    type Err = String;

    fn from_str(text: &str) -> Result<EnginePath, String> {
        let all = [EnginePath::Arena, EnginePath::Rings];
        let named = all.into_iter().find(|path| EnginePath::NAMES[*path as usize] == text);
        named.ok_or_else(|| {
            format!("invalid engine path \"{text}\": expected {}", EnginePath::NAMES.join(" or "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_rejected_with_the_expected_ones() {
        for name in EnginePath::NAMES {
            assert_eq!(name.parse::<EnginePath>().expect("a name").to_string(), name);
        }
        let error = "ring".parse::<EnginePath>().expect_err("not a path");
        assert_eq!(error, "invalid engine path \"ring\": expected arena or rings");
    }
}
