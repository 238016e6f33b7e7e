//! Validates a profile and its content. Pure.

use kube::ResourceExt;
use reprise_crds::SlackProfile;
use reprise_crds::status::Reason;

use super::PROFILES_MAX;
use super::content::{self, Revision};
use super::dereference::ProfileInputs;
use super::source::Source;
use crate::framework::refusal::Refusal;

/// Returns why a profile is rejected: a missing reference, no selecting cluster, or too many profiles. `None`
/// if it is accepted.
pub fn accepted(profile: &SlackProfile, inputs: &ProfileInputs) -> Option<Refusal> {
    if let Source::Missing(refusal) = &inputs.source {
        return Some(refusal.clone());
    }
    if let Some(error) = profile.spec.rollout.canary.as_ref().and_then(|canary| canary.soak.duration().err())
    {
        return Some(Refusal::new(Reason::InvalidSpec, format!("rollout.canary.soak: {error}")));
    }
    if inputs.clusters.is_empty() {
        let message = format!(
            "no KVCacheCluster in namespace {} selects this profile: set spec.slackProfiles of a cluster to labels of the \
             profile",
            profile.namespace().unwrap_or_default()
        );
        return Some(Refusal::new(Reason::ReferenceNotFound, message));
    }
    let over_limit = inputs.clusters.iter().find(|selecting| selecting.ahead >= PROFILES_MAX)?;
    let message = format!(
        "KVCacheCluster {} selects {PROFILES_MAX} profiles with precedence over this one, which is the limit of nodes, so they do not get \
         it. Profiles that nodes already have take precedence, then older ones: narrow spec.slackProfiles, or delete a profile",
        over_limit.cluster
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// Returns the revision of a profile.
///
/// # Errors
/// The measurement is unavailable or invalid; the refusal contains the remedy.
pub fn valid(profile: &SlackProfile, source: &Source) -> Result<Revision, Refusal> {
    let invalid = |message: String| Refusal::new(Reason::ProfileInvalid, message);
    let (measurement, location) = match source {
        Source::Missing(refusal) => return Err(refusal.clone()),
        Source::Inline(measurement) => (measurement.clone(), None),
        Source::Text { location, text } => {
            let parsed = content::parse(text).map_err(|error| invalid(format!("{location}: {error}")))?;
            (parsed, Some(location))
        }
    };
    content::revision(profile, measurement).map_err(|error| match location {
        Some(location) => invalid(format!("{location}: {error}")),
        None => invalid(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::super::dereference::SelectingCluster;
    use super::*;

    fn profile(more: &Value) -> SlackProfile {
        let mut spec = json!({ "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
    }

    fn found(source: Source, ahead: &[usize]) -> ProfileInputs {
        let selecting = |ahead: &usize| SelectingCluster { cluster: format!("n/c{ahead}"), ahead: *ahead };
        let clusters = ahead.iter().map(selecting).collect();
        ProfileInputs { source, clusters, nodes: Vec::new(), products: BTreeSet::new() }
    }

    fn text(text: &str) -> Source {
        Source::Text { location: "entry k of ConfigMap m".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn rejects_profiles_without_windows_without_clusters_or_beyond_the_limit() {
        let plain = profile(&json!({}));
        let gone = Refusal::new(Reason::ReferenceNotFound, "the ConfigMap is gone");
        let odd = profile(&json!({ "rollout": { "canary": { "nodeSelector": {}, "soak": "soon" } } }));
        for (profile, found, expected) in [
            (&plain, found(text("[]"), &[0, 15]), None),
            (
                &plain,
                found(Source::Missing(gone.clone()), &[0]),
                Some((gone.reason, "the ConfigMap is gone")),
            ),
            (
                &odd,
                found(text("[]"), &[0]),
                Some((Reason::InvalidSpec, "rollout.canary.soak: invalid amount \"soon\"")),
            ),
            (&plain, found(text("[]"), &[]), Some((Reason::ReferenceNotFound, "set spec.slackProfiles"))),
            (
                &plain,
                found(text("[]"), &[0, 16]),
                Some((
                    Reason::Conflict,
                    "KVCacheCluster n/c16 selects 16 profiles with precedence over this one",
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
    fn reports_invalid_content_with_its_location() {
        let plain = profile(&json!({}));
        let window = |least: u32, most: u32| {
            json!({
                "phase": "Decode", "minInputTokens": least, "maxInputTokens": most, "minPrefixTokens": 0,
                "maxPrefixTokens": 64, "layerMicros": 50, "slackMicros": 40, "freeSms": 4,
            })
        };
        let list = |windows: &[Value]| {
            let kernels = json!([{ "iocbs": 1, "micros": 9, "sms": 2 }]);
            json!({
                "stepTokens": 8, "iocbBytes": 65536, "windows": windows, "reads": kernels, "writes": kernels,
            })
            .to_string()
        };
        let mut inline = content::parse(&list(&[window(0, 8)])).expect("a measurement");
        inline.writes.clear();
        assert!(valid(&plain, &text(&list(&[window(0, 8), window(8, 9)]))).is_ok());
        for (source, words) in [
            (text("not yet"), "entry k of ConfigMap m: invalid measurement"),
            (text(&list(&[])), "entry k of ConfigMap m: there are no windows"),
            (text(&list(&[window(0, 9), window(8, 10)])), "windows[1] and windows[0] of Decode overlap"),
            (text(&list(&[window(9, 9)])), "windows[0] ends where it begins"),
            (Source::Inline(inline), "there are no writes"),
        ] {
            let refused = valid(&plain, &source).expect_err(words);
            assert_eq!(refused.reason, Reason::ProfileInvalid);
            assert!(refused.message.contains(words), "{}", refused.message);
        }
    }
}
