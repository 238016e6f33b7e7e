//! Certificates of processes on this machine: their validity, the mode of their keys, and whose they are.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::SystemTime;

use reprise_identity::credentials::KEY_FILE;
use reprise_identity::follow::REPLACE_AUTHORITY_WITHIN;
use reprise_identity::{Credentials, Role};

use super::{Finding, Verdict};
use crate::certs::{date, days};

/// Reports the certificates of a folder. `node` is the name of the node whose agent uses them.
pub(super) fn findings(folder: &Path, node: Option<&str>, now: SystemTime) -> Vec<Finding> {
    let finding = |verdict, found: String, consequence: String| {
        Finding::new(format!("certificates in {}", folder.display()), verdict, found, consequence)
    };
    let credentials = match Credentials::read(folder) {
        Ok(credentials) => credentials,
        Err(error) => {
            return vec![finding(Verdict::Bad, "unusable".to_owned(), error.to_string())];
        }
    };
    let mut findings = vec![validity(&credentials, now, finding)];
    if let Err(error) = credentials.check_issuer() {
        findings.push(finding(Verdict::Bad, "files of different folders".to_owned(), error.to_string()));
    }
    let role = &credentials.identity.role;
    if let Some(node) = node.filter(|node| *role != Role::Agent((*node).to_owned())) {
        findings.push(finding(
            Verdict::Bad,
            format!("of {role}, not of agent/{node}"),
            format!(
                "the agent does not start: `reprise certs issue agent/{node} --out {}`",
                folder.display()
            ),
        ));
    }
    findings.extend(key(folder, finding));
    findings.extend(authority(&credentials, now, finding));
    findings
}

fn validity(
    credentials: &Credentials,
    now: SystemTime,
    finding: impl Fn(Verdict, String, String) -> Finding,
) -> Finding {
    let left = credentials.remaining(now);
    let found =
        format!("{}, {} days left, ends {}", credentials.identity, days(left), date(credentials.not_after));
    let renew = "renew with `reprise certs renew`; processes use new files within seconds";
    if credentials.not_before > now {
        let begins = date(credentials.not_before);
        let why = format!(
            "others refuse it before {begins}: check the clocks of this machine and of the authority"
        );
        finding(Verdict::Bad, found, why)
    } else if left.is_zero() {
        finding(Verdict::Bad, found, format!("others refuse new connections: {renew}"))
    } else if credentials.is_renewal_due(now) {
        finding(Verdict::Fair, found, renew.to_owned())
    } else {
        let due = left.saturating_sub(credentials.valid_for() / 3);
        finding(Verdict::Good, found, format!("a renewal is due in {} days", days(due)))
    }
}

/// Reports a key that other users may read.
fn key(folder: &Path, finding: impl Fn(Verdict, String, String) -> Finding) -> Option<Finding> {
    let path = folder.join(KEY_FILE);
    let mode = fs::metadata(&path).ok()?.permissions().mode() & 0o777;
    (mode & 0o077 != 0).then(|| {
        finding(
            Verdict::Fair,
            format!("{KEY_FILE} has mode {mode:03o}"),
            format!(
                "other users may act as this process: chmod 600 {}, and renew it with --force",
                path.display()
            ),
        )
    })
}

/// Reports a trusted authority that ends within a year.
fn authority(
    credentials: &Credentials,
    now: SystemTime,
    finding: impl Fn(Verdict, String, String) -> Finding,
) -> Option<Finding> {
    let first = credentials.authorities.iter().min_by_key(|one| one.not_after)?;
    let left = first.remaining(now);
    (left < REPLACE_AUTHORITY_WITHIN).then(|| {
        finding(
            if left.is_zero() { Verdict::Bad } else { Verdict::Fair },
            format!("authority {}, {} days left", first.subject, days(left)),
            "replace it with `reprise certs authority add`, `switch` and `remove`".to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_identity::authority_folder::AuthorityFolder;
    use tempfile::TempDir;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn issued() -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = AuthorityFolder::create(&folder.path().join("ca"), "c").expect("a new folder");
        let role = Role::Agent("node-1".to_owned());
        authority.issue(role, 90 * DAY, &folder.path().join("tls")).expect("a certificate");
        folder
    }

    /// Verdicts and texts of the findings, `days` from now.
    fn texts(folder: &TempDir, node: Option<&str>, days: u32) -> Vec<(Verdict, String)> {
        let found = findings(&folder.path().join("tls"), node, SystemTime::now() + days * DAY);
        found.into_iter().map(|one| (one.verdict, format!("{}: {}", one.found, one.consequence))).collect()
    }

    #[test]
    fn certificate_is_good_then_due_then_ended() {
        let folder = issued();
        for (days, verdict, words) in [
            (0, Verdict::Good, "due in 59 days"),
            (61, Verdict::Fair, "reprise certs renew"),
            (91, Verdict::Bad, "refuse new connections"),
        ] {
            let found = texts(&folder, Some("node-1"), days);
            assert!(found.len() == 1 && found[0].0 == verdict && found[0].1.contains(words), "{found:?}");
        }
        let late = findings(&folder.path().join("tls"), None, SystemTime::now() - DAY);
        assert!(late[0].verdict == Verdict::Bad && late[0].consequence.contains("clocks"), "{late:?}");
        let found = texts(&folder, None, 3_400);
        assert!(found.iter().any(|(_, text)| text.contains("reprise certs authority add")), "{found:?}");
    }

    #[test]
    fn reports_another_node_a_readable_key_and_absent_files() {
        let folder = issued();
        let found = texts(&folder, Some("node-2"), 0);
        assert!(found[1].0 == Verdict::Bad && found[1].1.contains("not of agent/node-2"), "{found:?}");
        let key = folder.path().join("tls/tls.key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("own file");
        let found = texts(&folder, Some("node-1"), 0);
        assert!(found[1].0 == Verdict::Fair && found[1].1.contains("chmod 600"), "{found:?}");
        fs::remove_file(&key).expect("it exists");
        let found = texts(&folder, None, 0);
        assert!(
            found.len() == 1 && found[0].0 == Verdict::Bad && found[0].1.contains("tls.key"),
            "{found:?}"
        );
    }
}
