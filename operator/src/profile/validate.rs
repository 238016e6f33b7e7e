//! What is refused of a profile, and whether its content is one. Pure.

use kube::ResourceExt;
use reprise_crds::SlackProfile;
use reprise_crds::status::Reason;

use super::PROFILES_MAX;
use super::content::{self, Revision};
use super::dereference::Found;
use super::source::Source;
use crate::plan::Refusal;

/// Why a profile is refused, if it is: what it refers to is not there, or nobody wants it.
pub fn accepted(profile: &SlackProfile, found: &Found) -> Option<Refusal> {
    if let Source::Missing(refusal) = &found.source {
        return Some(refusal.clone());
    }
    if let Some(error) = profile.spec.rollout.canary.as_ref().and_then(|canary| canary.soak.duration().err())
    {
        return Some(Refusal::new(Reason::InvalidSpec, format!("rollout.canary.soak: {error}")));
    }
    if found.clusters.is_empty() {
        let message = format!(
            "no KVCacheCluster of namespace {} selects this profile: set slackProfiles of the one that it is for to labels that the profile \
             has",
            profile.namespace().unwrap_or_default()
        );
        return Some(Refusal::new(Reason::ReferenceNotFound, message));
    }
    let crowded = found.clusters.iter().find(|selecting| selecting.ahead >= PROFILES_MAX)?;
    let message = format!(
        "KVCacheCluster {} selects {PROFILES_MAX} profiles that come before this one, and a node has no more, so its nodes do not get it: \
         profiles that nodes have come first, then older ones. Narrow slackProfiles, or remove a profile",
        crowded.cluster
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// The revision that a profile is.
///
/// # Errors
/// Its windows cannot be read, or are none; why, and what to do.
pub fn valid(profile: &SlackProfile, source: &Source) -> Result<Revision, Refusal> {
    let invalid = |message: String| Refusal::new(Reason::ProfileInvalid, message);
    let (windows, place) = match source {
        Source::Missing(refusal) => return Err(refusal.clone()),
        Source::Windows(windows) => (windows.clone(), None),
        Source::Text { place, text } => {
            let windows = content::parse(text).map_err(|error| invalid(format!("{place}: {error}")))?;
            (windows, Some(place))
        }
    };
    content::revision(profile, windows).map_err(|error| match place {
        Some(place) => invalid(format!("{place}: {error}")),
        None => invalid(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::super::dereference::Selecting;
    use super::*;

    fn profile(more: &Value) -> SlackProfile {
        let mut spec = json!({ "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
    }

    fn found(source: Source, ahead: &[usize]) -> Found {
        let selecting = |ahead: &usize| Selecting { cluster: format!("n/c{ahead}"), ahead: *ahead };
        let clusters = ahead.iter().map(selecting).collect();
        Found { source, clusters, nodes: Vec::new(), products: BTreeSet::new() }
    }

    fn text(text: &str) -> Source {
        Source::Text { place: "entry k of ConfigMap m".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_profile_is_refused_when_nothing_is_there_nobody_wants_it_or_too_many_are_wanted() {
        let plain = profile(&json!({}));
        let gone = Refusal::new(Reason::ReferenceNotFound, "it is gone");
        let odd = profile(&json!({ "rollout": { "canary": { "nodeSelector": {}, "soak": "soon" } } }));
        for (profile, found, expected) in [
            (&plain, found(text("[]"), &[0, 15]), None),
            (&plain, found(Source::Missing(gone.clone()), &[0]), Some((gone.reason, "it is gone"))),
            (
                &odd,
                found(text("[]"), &[0]),
                Some((Reason::InvalidSpec, "rollout.canary.soak: 'soon' is not")),
            ),
            (&plain, found(text("[]"), &[]), Some((Reason::ReferenceNotFound, "set slackProfiles"))),
            (
                &plain,
                found(text("[]"), &[0, 16]),
                Some((
                    Reason::Conflict,
                    "KVCacheCluster n/c16 selects 16 profiles that come before this one",
                )),
            ),
        ] {
            let refused = accepted(profile, &found);
            match (&refused, expected) {
                (None, None) => {}
                (Some(refused), Some((reason, words))) => {
                    assert_eq!(refused.reason, reason);
                    assert!(refused.message.contains(words), "{}", refused.message);
                }
                _ => panic!("{refused:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn what_is_no_profile_is_said_with_its_place() {
        let plain = profile(&json!({}));
        let window = |least: u32, most: u32| json!({ "phase": "Decode", "minTokens": least, "maxTokens": most, "slackMicros": 40, "maxIoSms": 4 });
        let list = |windows: &[Value]| json!(windows).to_string();
        assert!(valid(&plain, &text(&list(&[window(0, 8), window(8, 9)]))).is_ok());
        for (source, words) in [
            (text("not yet"), "entry k of ConfigMap m: it is no JSON list of windows"),
            (text("[]"), "entry k of ConfigMap m: there are no windows"),
            (text(&list(&[window(0, 9), window(8, 10)])), "windows[1] and windows[0] of Decode overlap"),
            (text(&list(&[window(8, 9), window(0, 8)])), "sort the windows of Decode by minTokens"),
            (text(&list(&[window(9, 9)])), "windows[0] ends where it begins"),
            (Source::Windows(Vec::new()), "there are no windows"),
        ] {
            let refused = valid(&plain, &source).expect_err(words);
            assert_eq!(refused.reason, Reason::ProfileInvalid);
            assert!(refused.message.contains(words), "{}", refused.message);
        }
    }
}
