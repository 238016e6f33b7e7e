//! Certificates of a process while it runs: their files are followed, and metrics and pages show those in use.
//!
//! A process on plain connections has none: its gauges have no samples, and its pages have `null`.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use reprise_identity::follow::{CHECK_EVERY, Follower, Reloads};
use reprise_identity::{Security, Tls, TlsSettings};
use serde::Serialize;

/// Certificates in use. Clones share them; with the last one, their files are no longer followed.
#[derive(Clone, Debug, Default)]
pub struct Certificates(Option<Arc<InUse>>);

#[derive(Debug)]
struct InUse {
    tls: Tls,
    reloads: Arc<Reloads>,
}

/// State of the certificates in the pages of an admin port. Times are seconds, negative after the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CertificateStatus {
    /// Identity of the process.
    pub identity: String,
    /// SHA-256 of its certificate.
    pub fingerprint: String,
    /// Time until the certificate ends.
    pub certificate_seconds_left: i64,
    /// Number of trusted authorities: two while one is replaced.
    pub authorities: usize,
    /// Digest of the trusted authorities: equal on all processes after each step of a replacement.
    pub authorities_digest: String,
    /// Time until the first trusted authority ends.
    pub authority_seconds_left: i64,
    /// Number of changes of the files that were used.
    pub reloads: u64,
    /// Number of changes of the files that were refused.
    pub reloads_refused: u64,
    /// Reason why the files in the folder are not in use.
    pub problem: Option<String>,
}

impl Certificates {
    /// Follows the files of a process.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub fn start(security: &Security, settings: &TlsSettings) -> io::Result<Certificates> {
        let Security::Tls(tls) = security else { return Ok(Certificates::default()) };
        let follower = Follower::new(tls.clone(), settings.folder.clone());
        let in_use = Arc::new(InUse { tls: tls.clone(), reloads: follower.reloads() });
        let alive = Arc::downgrade(&in_use);
        // A thread, because the files may be on a slow file system.
        std::thread::Builder::new()
            .name("certificates".to_owned())
            .spawn(move || follow(follower, &alive))?;
        Ok(Certificates(Some(in_use)))
    }

    /// Registers the metrics of certificates.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(self.clone()));
    }

    /// State for a page; none on plain connections.
    pub fn status(&self) -> Option<CertificateStatus> {
        let InUse { tls, reloads } = &**self.0.as_ref()?;
        let (credentials, now) = (tls.credentials(), SystemTime::now());
        Some(CertificateStatus {
            identity: credentials.identity.to_string(),
            fingerprint: credentials.fingerprint.to_string(),
            certificate_seconds_left: seconds_until(credentials.not_after, now),
            authorities: credentials.authorities.len(),
            authorities_digest: credentials.authorities_digest().to_string(),
            authority_seconds_left: seconds_until(credentials.authorities_not_after(), now),
            reloads: reloads.accepted(),
            reloads_refused: reloads.refused(),
            problem: reloads.problem(),
        })
    }
}

fn follow(mut follower: Follower, alive: &Weak<InUse>) {
    while alive.strong_count() > 0 {
        follower.check(SystemTime::now());
        std::thread::sleep(CHECK_EVERY);
    }
}

fn seconds_until(end: SystemTime, now: SystemTime) -> i64 {
    let seconds = |duration: std::time::Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    match end.duration_since(now) {
        Ok(left) => seconds(left),
        Err(since) => -seconds(since.duration()),
    }
}

impl Collector for Certificates {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let status = self.status();
        let gauges: [(&str, &str, Option<i64>); 3] = [
            (
                "tls_certificate_expiry_seconds",
                "Time until the certificate of this process ends, negative after its end",
                status.as_ref().map(|status| status.certificate_seconds_left),
            ),
            (
                "tls_authority_expiry_seconds",
                "Time until the first trusted authority ends, negative after its end",
                status.as_ref().map(|status| status.authority_seconds_left),
            ),
            (
                "tls_authorities",
                "Trusted authorities: 2 while one is replaced",
                status.as_ref().map(|status| i64::try_from(status.authorities).unwrap_or(i64::MAX)),
            ),
        ];
        for (name, help, value) in gauges {
            let family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            if let Some(value) = value {
                ConstGauge::new(value).encode(family)?;
            }
        }
        let counters = [
            (
                "tls_reloads",
                "Changes of the certificate files that were used",
                status.as_ref().map(|s| s.reloads),
            ),
            (
                "tls_reloads_refused",
                "Changes of the certificate files that were refused, because they are invalid or of another process",
                status.as_ref().map(|s| s.reloads_refused),
            ),
        ];
        for (name, help, value) in counters {
            let family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value.unwrap_or_default()).encode(family)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;
    use reprise_identity::Role;
    use reprise_identity::authority_folder::AuthorityFolder;

    use super::*;

    fn text(certificates: &Certificates) -> String {
        let mut registry = Registry::with_prefix("p");
        certificates.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        text
    }

    fn value(text: &str, name: &str) -> Option<i64> {
        let line = text.lines().find(|line| line.starts_with(&format!("p_{name} ")))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    #[test]
    fn metrics_and_page_show_the_time_until_certificate_and_authority_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = AuthorityFolder::create(&folder.path().join("ca"), "c").expect("a new folder");
        let own = folder.path().join("member");
        let day = 86_400_i64;
        authority.issue(Role::Member, Duration::from_secs(10 * 86_400), &own).expect("a certificate");
        let settings = TlsSettings { folder: own, ..TlsSettings::default() };
        let security = settings.open(&Role::Member, &[]).expect("valid files");
        let certificates = Certificates::start(&security, &settings).expect("a thread");
        let text = text(&certificates);
        let left = value(&text, "tls_certificate_expiry_seconds").expect("a sample");
        assert!((10 * day - 60..=10 * day).contains(&left), "{left}");
        assert!(value(&text, "tls_authority_expiry_seconds").expect("a sample") > 3_000 * day);
        assert_eq!(value(&text, "tls_authorities"), Some(1));
        assert_eq!(value(&text, "tls_reloads_refused_total"), Some(0));
        let status = certificates.status().expect("TLS");
        assert_eq!(status.identity, "reprise://c/member");
        assert_eq!(status.authorities_digest, authority.authorities_digest().to_string());
    }

    #[test]
    fn plain_connections_have_no_times() {
        let plain = Certificates::start(&Security::Plain, &TlsSettings::default()).expect("no thread");
        assert_eq!(plain.status(), None);
        let text = text(&plain);
        assert!(text.contains("# TYPE p_tls_certificate_expiry_seconds gauge"), "{text}");
        assert_eq!(value(&text, "tls_certificate_expiry_seconds"), None);
        assert_eq!(value(&text, "tls_reloads_refused_total"), Some(0));
    }

    #[test]
    fn time_after_the_end_is_negative() {
        let now = SystemTime::now();
        let hour = Duration::from_secs(3_600);
        assert_eq!((seconds_until(now + hour, now), seconds_until(now - hour, now)), (3_600, -3_600));
    }
}
