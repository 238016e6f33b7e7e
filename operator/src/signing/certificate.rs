//! `reprise-operator certificate`: keeps the certificate of a pod's process, as a sidecar of its pod.
//!
//! ```text
//! ConfigMap of authorities ──▶ ca.crt ┐
//! new key ────────────────────▶ tls.key ├─▶ folder of the pod ──▶ agent, member or etcd reads the files
//! API server ─── operator ────▶ tls.crt ┘
//! ```
//!
//! The key is created here and stays in the volumes of the pod. A certificate is requested if there is no usable one, from two thirds of its
//! validity on, and [`SPREADS_WITHIN`] after another authority issues: by then, all pods trust both.
//!
//! Pods may `get` a request but not list or watch requests, so they can read only requests whose names they know. Names
//! are 128 bits of the digest of a request, whose key is new. RBAC cannot restrict `get` to the names that an account has created.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Args;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_identity::certificate::Fingerprint;
use reprise_identity::credentials::{Files, KEY_FILE};
use reprise_identity::{Credentials, Identity, NewRequest};
use serde_json::json;
use tokio::time::Instant;

use crate::framework::backoff::Backoff;
use crate::framework::clock;
use crate::reconcile::authority::first_certificate;
use crate::signing::SIGNER;
use crate::signing::review::USAGES;

/// Interval at which files are compared, as in the processes that follow them.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// Time from the first sight of another authority until a certificate of it is requested. The kubelet updates mounted
/// ConfigMaps within a minute or two.
const SPREADS_WITHIN: Duration = Duration::from_secs(180);

/// Time in which a request is answered. The operator may be starting, so a later request is tried again.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

/// Longest time between two attempts.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// Hexadecimal digits of the digest in the name of a request.
const NAME_DIGITS: usize = 32;

/// Interval of reading the request.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// Time for which a check waits for the first certificate. The kubelet reports each failed probe as a warning, also those
/// before the operator has answered.
pub const CHECK_WAITS: Duration = Duration::from_secs(50);

/// Paths and identity of a pod.
#[derive(Clone, Debug, Args)]
pub struct PodCertificate {
    /// Identity of the process, like reprise://CLUSTER.NAMESPACE/agent/NODE
    #[arg(long, env = "REPRISE_IDENTITY")]
    pub identity: Identity,
    /// Folder for ca.crt, tls.crt and tls.key
    #[arg(long)]
    pub folder: PathBuf,
    /// File with the certificates of the trusted authorities
    #[arg(long)]
    pub authorities: PathBuf,
}

/// Action of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    /// Write the authorities next to the present certificate.
    WriteAuthorities,
    Request,
}

impl PodCertificate {
    /// Waits for usable files in the folder, for at most [`CHECK_WAITS`]: the probe of the kubelet.
    ///
    /// # Errors
    /// They are absent, of another identity, have ended, or trust other authorities than the pod should.
    pub async fn check(&self) -> anyhow::Result<()> {
        let check = || {
            let files = Files::read(&self.folder)?;
            let remaining = self.usable(&files)?.remaining(clock::system_time());
            ensure!(!remaining.is_zero(), "the certificate has ended");
            // A folder that has outlived its pod may still have those before.
            let is_current = files.authorities == self.read_authorities()?;
            ensure!(is_current, "the folder does not have the present authorities yet");
            anyhow::Ok(())
        };
        let until = Instant::now() + CHECK_WAITS;
        while check().is_err() && Instant::now() < until {
            tokio::time::sleep(POLL_EVERY).await;
        }
        check()
    }

    fn read_authorities(&self) -> anyhow::Result<Vec<u8>> {
        std::fs::read(&self.authorities)
            .with_context(|| format!("cannot read {}", self.authorities.display()))
    }

    /// Returns the credentials of files if their authorities have issued the certificate for this identity.
    fn usable(&self, files: &Files) -> anyhow::Result<Credentials> {
        let credentials = Credentials::parse(files)?;
        credentials.check_issuer()?;
        let (found, wanted) = (&credentials.identity, &self.identity);
        ensure!(found == wanted, "the certificate is of {found}, not of {wanted}");
        Ok(credentials)
    }

    /// Keeps the certificate until the task is aborted.
    pub async fn keep(&self, client: &Client) {
        let backoff = Backoff::default();
        let mut seen = Seen::default();
        loop {
            let wait = match self.step(client, &mut seen).await {
                Ok(()) => {
                    backoff.record_success(KEY_FILE);
                    CHECK_EVERY
                }
                Err(error) => {
                    let wait = backoff.record_failure(KEY_FILE).min(RETRY_AFTER_MAX);
                    tracing::warn!(error = format!("{error:#}"), ?wait, "cannot get a certificate; retrying");
                    wait
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    async fn step(&self, client: &Client, seen: &mut Seen) -> anyhow::Result<()> {
        let authorities = self.read_authorities()?;
        let files = Files::read(&self.folder).ok();
        let action =
            self.decide(files.as_ref(), &authorities, seen.update(&authorities), clock::system_time());
        match (action, files) {
            (Action::WriteAuthorities, Some(files)) => {
                Files { authorities, ..files }.write(&self.folder).context("cannot write the files")?;
                tracing::info!("trust other authorities");
            }
            (Action::Request, _) => {
                let files = self.request(client, authorities).await?;
                files.write(&self.folder).context("cannot write the files")?;
                tracing::info!(identity = %self.identity, "got a certificate");
            }
            (Action::Nothing | Action::WriteAuthorities, _) => {}
        }
        Ok(())
    }

    /// Decides what to do with the present files. `seen_for` is the time since the authorities were first seen.
    fn decide(
        &self,
        files: Option<&Files>,
        authorities: &[u8],
        seen_for: Duration,
        now: SystemTime,
    ) -> Action {
        let Some(files) = files else { return Action::Request };
        let trusting =
            |authorities: &[u8]| self.usable(&Files { authorities: authorities.to_vec(), ..files.clone() });
        let is_valid = trusting(authorities).is_ok_and(|credentials| !credentials.is_renewal_due(now));
        if !is_valid {
            Action::Request
        } else if files.authorities != authorities {
            Action::WriteAuthorities
        } else if seen_for >= SPREADS_WITHIN
            && trusting(first_certificate(&String::from_utf8_lossy(authorities)).as_bytes()).is_err()
        {
            Action::Request
        } else {
            Action::Nothing
        }
    }

    /// Requests a certificate and waits for it.
    async fn request(&self, client: &Client, authorities: Vec<u8>) -> anyhow::Result<Files> {
        let NewRequest { key, request } = NewRequest::create(&self.identity)?;
        let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
        let name = format!("reprise-{}", &Fingerprint::of(request.as_bytes()).to_string()[..NAME_DIGITS]);
        let wanted = json!({
            "metadata": { "name": name },
            "spec": { "request": ByteString(request.into_bytes()), "signerName": SIGNER, "usages": USAGES },
        });
        let wanted = serde_json::from_value(wanted).expect("made above");
        requests.create(&PostParams::default(), &wanted).await.context("cannot request a certificate")?;
        let certificate = wait(&requests, &name).await?;
        let files = Files { authorities, certificate, key: key.into_bytes() };
        // A mix of old and new authorities: the file is read again with the next attempt.
        self.usable(&files).context("the issued certificate is unusable")?;
        Ok(files)
    }
}

/// Waits until a request has a certificate.
async fn wait(requests: &Api<CertificateSigningRequest>, name: &str) -> anyhow::Result<Vec<u8>> {
    let started = Instant::now();
    while started.elapsed() < ANSWERED_WITHIN {
        let status = requests.get(name).await.context("cannot read the request")?.status.unwrap_or_default();
        if let Some(certificate) = status.certificate {
            return Ok(certificate.0);
        }
        let mut refusals = status.conditions.into_iter().flatten();
        if let Some(refusal) = refusals.find(|one| one.type_ == "Denied" || one.type_ == "Failed") {
            bail!("the request {name} was denied: {}", refusal.message.unwrap_or_default());
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    bail!("the operator has not answered the request {name} within {ANSWERED_WITHIN:?}: check that it runs")
}

/// The authorities that were seen last, and since when.
#[derive(Debug, Default)]
struct Seen {
    authorities: Vec<u8>,
    since: Option<Instant>,
}

impl Seen {
    /// Returns the time since these authorities were first seen.
    fn update(&mut self, authorities: &[u8]) -> Duration {
        let now = Instant::now();
        if self.authorities != authorities {
            (self.authorities, self.since) = (authorities.to_vec(), Some(now));
        }
        self.since.map(|since| now.duration_since(since)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use reprise_identity::authority::{CERTIFICATE_VALID, Issued};
    use reprise_identity::{Authority, Role};

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn pod() -> PodCertificate {
        let identity = Identity::new("c.n", Role::Member).expect("valid names");
        PodCertificate { identity, folder: PathBuf::new(), authorities: PathBuf::new() }
    }

    fn files(authority: &Authority, identity: &Identity) -> Files {
        let Issued { certificate, key } = authority.issue(identity, CERTIFICATE_VALID).expect("valid");
        let authorities = authority.certificate().as_bytes().to_vec();
        Files { authorities, certificate: certificate.into_bytes(), key: key.into_bytes() }
    }

    #[test]
    fn certificate_is_requested_if_it_is_missing_due_or_of_another_identity() {
        let (pod, authority) = (pod(), Authority::create("c.n").expect("valid"));
        let present = files(&authority, &pod.identity);
        let now = clock::system_time();
        let decide =
            |files: Option<&Files>, now| pod.decide(files, authority.certificate().as_bytes(), DAY, now);
        assert_eq!(decide(None, now), Action::Request);
        assert_eq!(decide(Some(&present), now), Action::Nothing);
        assert_eq!(decide(Some(&present), now + 59 * DAY), Action::Nothing);
        assert_eq!(decide(Some(&present), now + 61 * DAY), Action::Request);
        let other = files(&authority, &Identity::new("c.n", Role::Admin).expect("valid names"));
        assert_eq!(decide(Some(&other), now), Action::Request);
    }

    #[test]
    fn another_authority_is_trusted_first_and_issues_later() {
        let (pod, now) = (pod(), clock::system_time());
        let (old, new) = (Authority::create("c.n").expect("valid"), Authority::create("c.n").expect("valid"));
        let present = files(&old, &pod.identity);
        let both = format!("{}{}", new.certificate(), old.certificate()).into_bytes();
        assert_eq!(pod.decide(Some(&present), &both, Duration::ZERO, now), Action::WriteAuthorities);
        let present = Files { authorities: both.clone(), ..present };
        assert_eq!(pod.decide(Some(&present), &both, Duration::ZERO, now), Action::Nothing);
        let after = pod.decide(Some(&present), &both, SPREADS_WITHIN, now);
        assert_eq!(after, Action::Request);
        let renewed = Files { authorities: both.clone(), ..files(&new, &pod.identity) };
        assert_eq!(pod.decide(Some(&renewed), &both, SPREADS_WITHIN, now), Action::Nothing);
        let only_new = new.certificate().as_bytes();
        assert_eq!(pod.decide(Some(&renewed), only_new, Duration::ZERO, now), Action::WriteAuthorities);
        let missing = pod.decide(Some(&present), only_new, Duration::ZERO, now);
        assert_eq!(missing, Action::Request, "its authority is no longer trusted");
    }
}
