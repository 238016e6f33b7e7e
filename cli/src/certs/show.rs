//! `reprise certs show`: facts of the certificates in directories.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use reprise_identity::Credentials;
use reprise_identity::authority_folder::{AUTHORITY_KEY_FILE, AuthorityFolder};
use reprise_identity::certificate::CertificateFacts;
use reprise_testkit::output::Audience;
use serde::Serialize;

/// Files of a process, as JSON.
#[derive(Serialize)]
struct ProcessView<'a> {
    folder: &'a Path,
    identity: String,
    fingerprint: String,
    begins: String,
    ends: String,
    days_left: u64,
    renewal_due: bool,
    /// Reason why other processes refuse the certificate.
    problem: Option<String>,
    authorities: Vec<CertificateView>,
    authorities_digest: String,
}

#[derive(Serialize)]
struct CertificateView {
    name: String,
    fingerprint: String,
    ends: String,
    days_left: u64,
}

/// Folder of an authority, as JSON.
#[derive(Serialize)]
struct FolderView<'a> {
    #[serde(flatten)]
    authority: super::AuthorityView,
    authorities: Vec<CertificateView>,
    issued: Vec<IssuedView<'a>>,
}

#[derive(Serialize)]
struct IssuedView<'a> {
    identity: String,
    folder: &'a Path,
    fingerprint: String,
    ends: String,
    days_left: u64,
}

/// Formats a time as a date of UTC.
pub(crate) fn date(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Whole days of a duration.
pub(crate) fn days(duration: Duration) -> u64 {
    duration.as_secs() / 86_400
}

fn days_until(end: SystemTime) -> u64 {
    days(end.duration_since(SystemTime::now()).unwrap_or_default())
}

impl CertificateView {
    fn new(facts: &CertificateFacts) -> CertificateView {
        CertificateView {
            name: facts.subject.clone(),
            fingerprint: facts.fingerprint.to_string(),
            ends: date(facts.not_after),
            days_left: days_until(facts.not_after),
        }
    }
}

/// Shows all directories; fails at the first one that has neither certificates nor an authority.
pub(super) fn command(folders: &[PathBuf], audience: Audience) -> anyhow::Result<()> {
    for folder in folders {
        if folder.join(AUTHORITY_KEY_FILE).exists() {
            show_authority(folder, audience)?;
        } else {
            show_process(folder, audience)?;
        }
    }
    Ok(())
}

fn show_authority(folder: &Path, audience: Audience) -> anyhow::Result<()> {
    let authority = AuthorityFolder::open(folder)?;
    let issued = authority.issued()?;
    let view = FolderView {
        authority: super::AuthorityView::new(folder, &authority),
        authorities: authority.authorities().iter().map(CertificateView::new).collect(),
        issued: issued
            .iter()
            .map(|record| IssuedView {
                identity: record.identity.to_string(),
                folder: &record.folder,
                fingerprint: record.fingerprint.to_string(),
                ends: date(record.not_after),
                days_left: days_until(record.not_after),
            })
            .collect(),
    };
    audience.emit(&view);
    audience.print_line(format!("authority of cluster {} in {}", authority.cluster(), folder.display()));
    print_authorities(audience, &view.authorities, &view.authority.authorities_digest);
    audience.print_line(format!("  issues from   {}", view.authority.issuer));
    for one in &view.issued {
        audience.print_line(format!(
            "  issued        {}, {} days left, in {}",
            one.identity,
            one.days_left,
            one.folder.display()
        ));
    }
    Ok(())
}

fn show_process(folder: &Path, audience: Audience) -> anyhow::Result<()> {
    let credentials = Credentials::read(folder)?;
    let now = SystemTime::now();
    let view = ProcessView {
        folder,
        identity: credentials.identity.to_string(),
        fingerprint: credentials.fingerprint.to_string(),
        begins: date(credentials.not_before),
        ends: date(credentials.not_after),
        days_left: days(credentials.remaining(now)),
        renewal_due: credentials.is_renewal_due(now),
        problem: problem(&credentials, now),
        authorities: credentials.authorities.iter().map(CertificateView::new).collect(),
        authorities_digest: credentials.authorities_digest().to_string(),
    };
    audience.emit(&view);
    audience.print_line(format!("{} in {}", view.identity, folder.display()));
    audience.print_line(format!("  fingerprint   {}", view.fingerprint));
    let due = if view.renewal_due { ", renewal is due" } else { "" };
    audience.print_line(format!(
        "  valid         {} to {}, {} days left{due}",
        view.begins, view.ends, view.days_left
    ));
    print_authorities(audience, &view.authorities, &view.authorities_digest);
    if let Some(problem) = &view.problem {
        audience.print_line(format!("  PROBLEM       {problem}"));
    }
    Ok(())
}

/// Reason why other processes refuse credentials now.
fn problem(credentials: &Credentials, now: SystemTime) -> Option<String> {
    if let Err(error) = credentials.check_issuer() {
        return Some(error.to_string());
    }
    if credentials.not_before > now {
        return Some(
            "the certificate is not valid yet: check the clocks of this machine and of the authority"
                .to_owned(),
        );
    }
    let has_ended = credentials.remaining(now).is_zero();
    has_ended.then(|| "the certificate has ended: renew it with `reprise certs renew`".to_owned())
}

fn print_authorities(audience: Audience, authorities: &[CertificateView], digest: &str) {
    for one in authorities {
        audience.print_line(format!(
            "  trusts        {}, {} days left, {}",
            one.name, one.days_left, one.fingerprint
        ));
    }
    audience.print_line(format!("  trust digest  {digest}"));
}
