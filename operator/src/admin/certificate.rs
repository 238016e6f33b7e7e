//! Certificate of the admin port.
//!
//! The operator serves several clusters, whose authorities do not trust each other. Its admin port therefore has its own
//! authority, in Secret [`SECRET`] of the operator's namespace, and admits scrapers by their token. Each replica
//! issues its own certificate, which is in memory only. A scraper verifies it with entry `tls.crt` of the Secret, for the
//! name `operator.reprise`.
//!
//! The Secret is immutable. To replace the authority, delete the Secret: replicas create another one within an hour.
//!
//! The port opens before the API server answers, because probes need it. Until then, its certificate is of an authority
//! that no scraper knows.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::{Authority, Credentials, Identity, Role, Tls};
use serde_json::json;

use crate::framework::clock;
use crate::framework::error::{CONFLICT, OperatorError};
use crate::framework::labels::OPERATOR;
use crate::framework::lease::{self, Account};
use crate::reconcile::authority::{self, CERTIFICATE, KEY, failed};

/// Secret with the authority.
const SECRET: &str = "reprise-operator-admin";

/// Interval of checks of the Secret and of the certificate's validity.
const CHECK_EVERY: Duration = Duration::from_secs(3_600);

/// Interval of new attempts after a failed check.
const RETRY_EVERY: Duration = Duration::from_secs(10);

/// Key of the log condition for a failed check.
const NO_CERTIFICATE: &str = "no_admin_certificate";

/// Certificate of the admin port of one replica.
#[derive(Debug)]
pub struct AdminCertificate {
    identity: Identity,
    secrets: Api<Secret>,
    /// Owner of the Secret, which is deleted with it.
    account: Option<Account>,
    tls: Tls,
    /// Certificate of the authority that has issued the one in use.
    issuer: String,
}

impl AdminCertificate {
    /// Issues a first certificate, of an authority that no scraper knows.
    ///
    /// # Errors
    /// The namespace is not a valid name.
    pub fn provisional(
        client: &Client,
        namespace: &str,
        account: Option<Account>,
    ) -> Result<AdminCertificate, OperatorError> {
        let name = format!("{OPERATOR}.{namespace}");
        let identity = Identity::new(&name, Role::Operator).map_err(failed)?;
        let authority = Authority::create(&name).map_err(failed)?;
        let tls = Tls::new(issue(&authority, &identity)?);
        let issuer = authority.certificate().to_owned();
        let secrets = Api::namespaced(client.clone(), namespace);
        Ok(AdminCertificate { identity, secrets, account, tls, issuer })
    }

    /// Certificate in use; it is replaced while the process runs.
    pub fn tls(&self) -> &Tls {
        &self.tls
    }

    /// Keeps a valid certificate of the authority in the Secret, until the task is aborted.
    pub async fn keep(mut self) {
        loop {
            let wait = match self.check().await {
                Ok(()) => {
                    tracing::info!(recovered = NO_CERTIFICATE, "scrapers can verify the operator's metrics");
                    CHECK_EVERY
                }
                Err(error) => {
                    tracing::warn!(
                        condition = NO_CERTIFICATE,
                        error = error.message(),
                        "no certificate of Secret {SECRET} for scrapers of the operator's metrics; retrying"
                    );
                    RETRY_EVERY
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    async fn check(&mut self) -> Result<(), OperatorError> {
        let (authority, now) = (self.authority().await?, clock::system_time());
        if authority.certificate() != self.issuer || self.tls.credentials().is_renewal_due(now) {
            self.tls.replace(issue(&authority, &self.identity)?);
            authority.certificate().clone_into(&mut self.issuer);
            tracing::info!(identity = %self.identity, "the admin port uses a new certificate");
        }
        Ok(())
    }

    /// Reads the authority, or creates it.
    async fn authority(&self) -> Result<Authority, OperatorError> {
        let read = || async {
            self.secrets.get_opt(SECRET).await.map_err(OperatorError::api(format!("get Secret {SECRET}")))
        };
        if let Some(secret) = read().await? {
            return load(&secret);
        }
        let authority = Authority::create(&self.identity.cluster).map_err(failed)?;
        let owner = lease::owner(self.account.as_ref()).await;
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "immutable": true,
            "metadata": { "name": SECRET, "ownerReferences": Vec::from_iter(owner) },
            "data": { CERTIFICATE: bytes(authority.certificate()), KEY: bytes(authority.key()) },
        });
        let secret: Secret = serde_json::from_value(secret).expect("made above");
        let params =
            PostParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match self.secrets.create(&params, &secret).await {
            Ok(_) => Ok(authority),
            Err(kube::Error::Api(status)) if status.code == CONFLICT => match read().await? {
                Some(secret) => load(&secret),
                None => Err(failed(format!("Secret {SECRET} was deleted meanwhile"))),
            },
            Err(error) => Err(OperatorError::api(format!("create Secret {SECRET}"))(error)),
        }
    }
}

fn load(secret: &Secret) -> Result<Authority, OperatorError> {
    authority::load(secret).map_err(|error| {
        failed(format!(
            "Secret {SECRET} has no usable authority: {error}; delete it, and the operator creates another"
        ))
    })
}

fn issue(authority: &Authority, identity: &Identity) -> Result<Credentials, OperatorError> {
    let issued = authority.issue(identity, CERTIFICATE_VALID).map_err(failed)?;
    issued.into_credentials(authority.certificate()).map_err(failed)
}
