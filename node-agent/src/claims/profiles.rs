//! Slack profiles that the node should work by: found beside the configuration, checked, and put into effect.
//!
//! The node's spec names profiles and digests; the contents lie beside the configuration as files that are called by their digests, which the
//! kubelet brings a little later than the spec. A content whose digest is another, or that is no profile, is refused in words, and the
//! revision before stays in effect; so it does while the wanted file has not come. What is refused is read again from time to time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{ProfileFact, ProfileWish};
use reprise_policy::slack::{Content, Profile};

use crate::config::digest;
use crate::slack::{Effective, InEffect};

/// A content: 256 windows of 100 bytes and four short texts.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Characters of a digest that tell it from others in a message.
const DIGEST_CHARS: usize = "sha256:".len() + 12;

/// See the module.
pub(super) struct Profiles {
    folder: PathBuf,
    wishes: Vec<ProfileWish>,
    /// Why a wanted revision is not in effect, by the profile's name.
    unmet: BTreeMap<String, Unmet>,
    in_effect: InEffect,
}

/// Why a wanted revision is not in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unmet {
    /// Its file is not there yet.
    Absent,
    /// Its file cannot be used, in words.
    Refused(String),
}

impl Profiles {
    /// None so far.
    pub(super) fn new(folder: &Path, in_effect: InEffect) -> Profiles {
        Profiles { folder: folder.to_owned(), wishes: Vec::new(), unmet: BTreeMap::new(), in_effect }
    }

    /// What is wanted from now on; `None`: as before. What is wanted no more is in effect no more.
    pub(super) fn want(&mut self, wishes: Option<Vec<ProfileWish>>) {
        let Some(wishes) = wishes else { return };
        let is_wanted = |name: &str| wishes.iter().any(|wish| wish.name == name);
        self.in_effect.keep_only(is_wanted);
        // Why another revision was refused says nothing of this one.
        self.unmet.clear();
        self.wishes = wishes;
    }

    /// Reads what is wanted and not in effect.
    pub(super) fn look(&mut self) {
        for wish in &self.wishes {
            if self.in_effect.get(&wish.name).is_some_and(|held| held.digest == wish.digest) {
                continue;
            }
            let (name, digest) = (wish.name.clone(), wish.digest.clone());
            match read(&self.folder.join(&wish.file), &wish.digest) {
                Ok(profile) => {
                    tracing::info!(profile = name, digest, "a slack profile is in effect");
                    self.unmet.remove(&name);
                    self.in_effect.put(&name, Effective { digest, profile });
                }
                Err(unmet) => {
                    if let Unmet::Refused(why) = &unmet
                        && self.unmet.get(&name) != Some(&unmet)
                    {
                        tracing::warn!(profile = name, digest, why, "a slack profile is refused");
                    }
                    self.unmet.insert(name, unmet);
                }
            }
        }
    }

    /// What is told of them: of each the wanted revision, if it is in effect or refused, else the one before.
    pub(super) fn facts(&self) -> Vec<ProfileFact> {
        let fact = |wish: &ProfileWish| {
            let held = self.in_effect.get(&wish.name);
            let told = |digest: &str, refused| {
                Some(ProfileFact { name: wish.name.clone(), digest: digest.to_owned(), refused })
            };
            match (self.unmet.get(&wish.name), held) {
                (Some(Unmet::Refused(why)), None) => told(&wish.digest, Some(why.clone())),
                (Some(Unmet::Refused(why)), Some(held)) => {
                    let stays = format!("{} stays in effect: {why}", short(&held.digest));
                    told(&wish.digest, Some(stays))
                }
                (_, Some(held)) => told(&held.digest, None),
                (_, None) => None,
            }
        };
        self.wishes.iter().filter_map(fact).collect()
    }

    /// Which revision is waited for.
    pub(super) fn pending(&self) -> Option<String> {
        let wish = self.wishes.iter().find(|wish| self.unmet.get(&wish.name) == Some(&Unmet::Absent))?;
        Some(format!(
            "revision {} of profile {} is not in {} yet: the kubelet brings it with the agents' ConfigMap",
            short(&wish.digest),
            wish.name,
            self.folder.display()
        ))
    }
}

fn short(digest: &str) -> &str {
    digest.get(..DIGEST_CHARS).unwrap_or(digest)
}

fn read(path: &Path, wanted: &str) -> Result<Profile, Unmet> {
    let mut bytes = Vec::new();
    let opened = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(Unmet::Absent),
        Err(error) => return Err(Unmet::Refused(format!("its file cannot be read: {error}"))),
        Ok(_) if bytes.len() as u64 > FILE_BYTES_MAX => {
            return Err(Unmet::Refused(format!("its file has more than {FILE_BYTES_MAX} bytes")));
        }
        Ok(_) => {}
    }
    let found = digest(&bytes);
    if found != wanted {
        let why = format!(
            "the content of its file has the digest {}, and {} is wanted: look who writes the agents' ConfigMap",
            short(&found),
            short(wanted)
        );
        return Err(Unmet::Refused(why));
    }
    let content: Content = serde_json::from_slice(&bytes)
        .map_err(|error| Unmet::Refused(format!("this version of the agent cannot read it: {error}")))?;
    Profile::new(content).map_err(|error| Unmet::Refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use reprise_policy::slack::{Budget, Phase};

    use super::*;

    /// A content with windows of so many microseconds.
    fn content(micros: u32) -> String {
        let subject = r#"{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"e"}"#;
        let window = r#"{"phase":"Decode","minTokens":0,"maxTokens":8,"slackMicros":MICROS,"maxIoSms":4}"#;
        let window = window.replace("MICROS", &micros.to_string());
        let rest = r#""usablePercent":100,"fallback":"PauseIo","maxErrorPercent":30"#;
        format!(r#"{{"subject":{subject},{rest},"windows":[{window}]}}"#)
    }

    fn wish(text: &str) -> ProfileWish {
        let digest = digest(text.as_bytes());
        let file = format!("profile-{}.json", digest.trim_start_matches("sha256:"));
        ProfileWish { name: "llama".to_owned(), digest, file }
    }

    struct Node {
        folder: tempfile::TempDir,
        in_effect: InEffect,
        profiles: Profiles,
    }

    impl Node {
        fn new() -> Node {
            let (folder, in_effect) = (tempfile::tempdir().expect("a folder"), InEffect::default());
            let profiles = Profiles::new(folder.path(), in_effect.clone());
            Node { folder, in_effect, profiles }
        }

        fn write(&self, wish: &ProfileWish, text: &str) {
            std::fs::write(self.folder.path().join(&wish.file), text).expect("written");
        }

        fn want(&mut self, wish: &ProfileWish) {
            self.profiles.want(Some(vec![wish.clone()]));
            self.profiles.look();
        }

        /// Digest and refusal of what is told.
        fn told(&self) -> Option<(String, Option<String>)> {
            let mut facts = self.profiles.facts();
            assert!(facts.len() <= 1, "{facts:?}");
            facts.pop().map(|fact| (fact.digest, fact.refused))
        }

        fn micros(&self) -> Option<u32> {
            match self.in_effect.get("llama")?.profile.budget(Phase::Decode, 7) {
                Budget::Window { micros, .. } => Some(micros),
                Budget::Outside(_) => None,
            }
        }
    }

    #[test]
    fn a_profile_is_in_effect_once_its_file_has_come_and_ends_with_the_wish() {
        let mut node = Node::new();
        let (first, second) = (wish(&content(40)), wish(&content(50)));
        node.want(&first);
        assert_eq!((node.told(), node.micros()), (None, None));
        let pending = node.profiles.pending().expect("it waits");
        assert!(pending.contains("llama") && pending.contains(short(&first.digest)), "{pending}");
        node.write(&first, &content(40));
        node.profiles.look();
        assert_eq!((node.told(), node.micros()), (Some((first.digest.clone(), None)), Some(40)));
        assert_eq!(node.profiles.pending(), None);

        // The one before stays in effect as long as the next has not come.
        node.want(&second);
        assert_eq!((node.told(), node.micros()), (Some((first.digest.clone(), None)), Some(40)));
        assert!(node.profiles.pending().is_some());
        node.write(&second, &content(50));
        node.profiles.look();
        assert_eq!((node.told(), node.micros()), (Some((second.digest.clone(), None)), Some(50)));

        node.profiles.want(None);
        assert_eq!(node.micros(), Some(50), "what cannot be read changes nothing");
        node.profiles.want(Some(Vec::new()));
        assert_eq!((node.told(), node.micros()), (None, None));
    }

    #[test]
    fn a_content_that_is_another_or_none_is_refused_in_words_and_the_one_before_stays() {
        let mut node = Node::new();
        let good = wish(&content(40));
        node.write(&good, &content(40));
        node.want(&good);
        let window = r#"{"phase":"Decode","minTokens":7,"maxTokens":9,"slackMicros":1,"maxIoSms":4}"#;
        let twice = content(50).replace("}]", &format!("}},{window}]"));
        let later = content(50).replace("\"fallback\"", "\"mood\":1,\"fallback\"");
        let long = " ".repeat(usize::try_from(FILE_BYTES_MAX).expect("it fits") + 1);
        for (text, written, words) in [
            (content(50), content(51), "the content of its file has the digest"),
            (twice.clone(), twice, "overlap"),
            (later.clone(), later, "unknown field `mood`"),
            ("not yet".to_owned(), "not yet".to_owned(), "cannot read it"),
            (long.clone(), long, "more than"),
        ] {
            let wish = wish(&text);
            node.write(&wish, &written);
            node.want(&wish);
            let (told, refused) = node.told().expect("it is told");
            let refused = refused.expect("it is refused");
            assert_eq!(told, wish.digest);
            assert!(refused.contains(words) && refused.contains(short(&good.digest)), "{refused}");
            assert_eq!(node.micros(), Some(40));
            // It is looked at again, and taken once it is right.
            if written != text {
                node.write(&wish, &text);
                node.profiles.look();
                assert_eq!((node.told(), node.micros()), (Some((wish.digest, None)), Some(50)));
                node.want(&good);
                assert_eq!(node.micros(), Some(40));
            }
        }
    }
}
