//! Slack profiles of the node: found next to the configuration file, validated and activated.
//!
//! The node's spec lists profiles and digests. The kubelet delivers the contents as files next to the
//! configuration, some time after the spec. A file whose digest differs, or whose content is invalid, is
//! rejected with a reason. Until the desired revision is valid, the previous one stays active. Rejected
//! files are re-read periodically.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{DesiredProfile, ProfileFact};
use reprise_policy::slack::Profile;

use crate::config::digest;
use crate::slack::{ActiveProfile, ActiveProfiles, profile_file};

/// Length of a digest prefix in messages.
const DIGEST_CHARS: usize = "sha256:".len() + 12;

/// The desired slack profiles and their state.
pub(super) struct Profiles {
    folder: PathBuf,
    desired: Vec<DesiredProfile>,
    /// Why the desired revision is not active, by profile name.
    not_in_effect: BTreeMap<String, NotInEffect>,
    active: ActiveProfiles,
}

/// Why a desired revision is not active.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NotInEffect {
    /// Its file does not exist yet.
    Missing,
    /// Its file is invalid, for this reason.
    Rejected(String),
}

impl Profiles {
    /// Starts without desired profiles.
    pub(super) fn new(folder: &Path, active: ActiveProfiles) -> Profiles {
        Profiles { folder: folder.to_owned(), desired: Vec::new(), not_in_effect: BTreeMap::new(), active }
    }

    /// Sets the desired profiles; `None` changes nothing. Profiles that are no longer desired are
    /// deactivated.
    pub(super) fn set_desired(&mut self, desired: Option<Vec<DesiredProfile>>) {
        let Some(desired) = desired else { return };
        let is_wanted = |name: &str| desired.iter().any(|profile| profile.name == name);
        self.active.keep_only(is_wanted);
        // The reasons refer to other revisions.
        self.not_in_effect.clear();
        self.desired = desired;
    }

    /// Reads desired profiles that are not active.
    pub(super) fn refresh(&mut self) {
        for profile in &self.desired {
            if self.active.get(&profile.name).is_some_and(|held| held.digest == profile.digest) {
                continue;
            }
            let (name, digest) = (profile.name.clone(), profile.digest.clone());
            match read(&self.folder.join(&profile.file), &profile.digest) {
                Ok(profile) => {
                    tracing::info!(profile = name, digest, "activated a slack profile");
                    self.not_in_effect.remove(&name);
                    self.active.put(&name, ActiveProfile { digest, profile });
                }
                Err(not_in_effect) => {
                    if let NotInEffect::Rejected(why) = &not_in_effect
                        && self.not_in_effect.get(&name) != Some(&not_in_effect)
                    {
                        tracing::warn!(profile = name, digest, why, "rejected a slack profile");
                    }
                    self.not_in_effect.insert(name, not_in_effect);
                }
            }
        }
    }

    /// Returns the reported state of each profile: the desired revision if it is active or rejected, else
    /// the previous one.
    pub(super) fn facts(&self) -> Vec<ProfileFact> {
        let fact = |profile: &DesiredProfile| {
            let held = self.active.get(&profile.name);
            let reported = |digest: &str, refused| {
                let name = profile.name.clone();
                let prediction_error = match refused {
                    None => self.active.prediction_error(&name),
                    Some(_) => None,
                };
                Some(ProfileFact { name, digest: digest.to_owned(), refused, prediction_error })
            };
            match (self.not_in_effect.get(&profile.name), held) {
                (Some(NotInEffect::Rejected(why)), None) => reported(&profile.digest, Some(why.clone())),
                (Some(NotInEffect::Rejected(why)), Some(held)) => {
                    let stays = format!("{} stays active: {why}", short(&held.digest));
                    reported(&profile.digest, Some(stays))
                }
                (_, Some(held)) => reported(&held.digest, None),
                (_, None) => None,
            }
        };
        self.desired.iter().filter_map(fact).collect()
    }

    /// Returns which revision is pending, as a message.
    pub(super) fn pending(&self) -> Option<String> {
        let profile = self
            .desired
            .iter()
            .find(|profile| self.not_in_effect.get(&profile.name) == Some(&NotInEffect::Missing))?;
        Some(format!(
            "revision {} of profile {} is not in {} yet: waiting for the kubelet to update the agents' ConfigMap",
            short(&profile.digest),
            profile.name,
            self.folder.display()
        ))
    }
}

fn short(digest: &str) -> &str {
    digest.get(..DIGEST_CHARS).unwrap_or(digest)
}

fn read(path: &Path, wanted: &str) -> Result<Profile, NotInEffect> {
    let bytes = match profile_file::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(NotInEffect::Missing),
        Err(error) => return Err(NotInEffect::Rejected(format!("cannot read its file: {error}"))),
        Ok(bytes) => bytes,
    };
    let found = digest(&bytes);
    if found != wanted {
        let why = format!(
            "its file has digest {}, expected {}: check which process writes the agents' ConfigMap",
            short(&found),
            short(wanted)
        );
        return Err(NotInEffect::Rejected(why));
    }
    profile_file::parse(&bytes).map_err(NotInEffect::Rejected)
}

#[cfg(test)]
mod tests {
    use reprise_policy::slack::{Budget, Computation, Phase};

    use super::*;
    use crate::slack::profile_file::FILE_BYTES_MAX;

    /// Returns a profile whose window has this slack.
    fn content(micros: u32) -> String {
        let subject = r#"{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"e"}"#;
        let window = window(0, 8, micros);
        let rest = r#""usablePercent":100,"fallback":"PauseIo","maxErrorPercent":30"#;
        let kernels = r#"[{"iocbs":1,"micros":20,"sms":2}]"#;
        let steps = r#""stepTokens":8,"iocbBytes":65536"#;
        format!(
            r#"{{"subject":{subject},{rest},"measurement":{{{steps},"windows":[{window}],"reads":{kernels},"writes":{kernels}}}}}"#
        )
    }

    fn window(least: u32, end: u32, micros: u32) -> String {
        let tokens = format!(r#""minInputTokens":{least},"maxInputTokens":{end},"minPrefixTokens":0"#);
        let time = format!(r#""layerMicros":90,"slackMicros":{micros},"freeSms":4"#);
        format!(r#"{{"phase":"Decode",{tokens},"maxPrefixTokens":64,{time}}}"#)
    }

    fn profile(text: &str) -> DesiredProfile {
        let digest = digest(text.as_bytes());
        let file = format!("profile-{}.json", digest.trim_start_matches("sha256:"));
        DesiredProfile { name: "llama".to_owned(), digest, file }
    }

    struct Node {
        folder: tempfile::TempDir,
        active: ActiveProfiles,
        profiles: Profiles,
    }

    impl Node {
        fn new() -> Node {
            let (folder, active) = (tempfile::tempdir().expect("a folder"), ActiveProfiles::default());
            let profiles = Profiles::new(folder.path(), active.clone());
            Node { folder, active, profiles }
        }

        fn write(&self, profile: &DesiredProfile, text: &str) {
            std::fs::write(self.folder.path().join(&profile.file), text).expect("written");
        }

        fn set_desired(&mut self, profile: &DesiredProfile) {
            self.profiles.set_desired(Some(vec![profile.clone()]));
            self.profiles.refresh();
        }

        /// Returns the reported digest and rejection.
        fn reported(&self) -> Option<(String, Option<String>)> {
            let mut facts = self.profiles.facts();
            assert!(facts.len() <= 1, "{facts:?}");
            facts.pop().map(|fact| (fact.digest, fact.refused))
        }

        fn micros(&self) -> Option<u32> {
            let computation = Computation { phase: Phase::Decode, input_tokens: 7, prefix_tokens: 9 };
            match self.active.get("llama")?.profile.budget(computation) {
                Budget::Window { micros, .. } => Some(micros),
                Budget::Outside(_) => None,
            }
        }
    }

    #[test]
    fn profile_is_active_from_the_arrival_of_its_file_until_it_is_no_longer_desired() {
        let mut node = Node::new();
        let (first, second) = (profile(&content(40)), profile(&content(50)));
        node.set_desired(&first);
        assert_eq!((node.reported(), node.micros()), (None, None));
        let pending = node.profiles.pending().expect("the revision is pending");
        assert!(pending.contains("llama") && pending.contains(short(&first.digest)), "{pending}");
        node.write(&first, &content(40));
        node.profiles.refresh();
        assert_eq!((node.reported(), node.micros()), (Some((first.digest.clone(), None)), Some(40)));
        assert_eq!(node.profiles.pending(), None);

        // The previous revision stays active until the next one arrives.
        node.set_desired(&second);
        assert_eq!((node.reported(), node.micros()), (Some((first.digest.clone(), None)), Some(40)));
        assert!(node.profiles.pending().is_some());
        node.write(&second, &content(50));
        node.profiles.refresh();
        assert_eq!((node.reported(), node.micros()), (Some((second.digest.clone(), None)), Some(50)));

        node.profiles.set_desired(None);
        assert_eq!(node.micros(), Some(50), "an unparsable spec changes nothing");
        node.profiles.set_desired(Some(Vec::new()));
        assert_eq!((node.reported(), node.micros()), (None, None));
    }

    #[test]
    fn invalid_content_is_rejected_and_the_previous_revision_stays_active() {
        let mut node = Node::new();
        let good = profile(&content(40));
        node.write(&good, &content(40));
        node.set_desired(&good);
        let twice = content(50).replacen("}]", &format!("}},{}]", window(7, 9, 1)), 1);
        let later = content(50).replace("\"fallback\"", "\"mood\":1,\"fallback\"");
        let long = " ".repeat(usize::try_from(FILE_BYTES_MAX).expect("it fits") + 1);
        for (text, written, words) in [
            (content(50), content(51), "its file has digest"),
            (twice.clone(), twice, "overlap"),
            (later.clone(), later, "unknown field `mood`"),
            ("not yet".to_owned(), "not yet".to_owned(), "cannot parse it"),
            (long.clone(), long, "exceeds"),
        ] {
            let profile = profile(&text);
            node.write(&profile, &written);
            node.set_desired(&profile);
            let (reported, refused) = node.reported().expect("the profile is reported");
            let refused = refused.expect("the profile is rejected");
            assert_eq!(reported, profile.digest);
            assert!(refused.contains(words) && refused.contains(short(&good.digest)), "{refused}");
            assert_eq!(node.micros(), Some(40));
            // It is re-read and activated once it is valid.
            if written != text {
                node.write(&profile, &text);
                node.profiles.refresh();
                assert_eq!((node.reported(), node.micros()), (Some((profile.digest, None)), Some(50)));
                node.set_desired(&good);
                assert_eq!(node.micros(), Some(40));
            }
        }
    }
}
