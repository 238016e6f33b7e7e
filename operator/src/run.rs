//! The life of one operator replica, from start to exit.
//!
//! Start order: admin port, watches, lease, controllers. A replica that waits for the lease has filled its stores
//! already, so it can take over at once.
//!
//! On SIGTERM the controllers finish their running reconciles while the lease is still renewed; then the lease is
//! released. Losing the lease ends the process immediately, because another replica may already be
//! reconciling.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use reprise_daemon::guard::Guard;
use reprise_identity::Security;
use tokio::net::TcpListener;
use tokio::sync::watch as flag;
use tokio::task::JoinSet;

use crate::admin::certificate::AdminCertificate;
use crate::admin::scrapers;
use crate::framework::api_client::ApiRequests;
use crate::framework::controller;
use crate::framework::lease::{Account, Election};
use crate::reconcile::authority;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::stores::Stores;
use crate::reconcile::{allocation, cluster, node, orphans, pool, profile, tenant, watches};
use crate::settings::Settings;
use crate::{admin, signing};

/// Time for running reconciles to finish at shutdown. The kubelet kills a pod after 30 s, and the lease must
/// be released before that. A test of the chart parses this line.
const STOPS_WITHIN: Duration = Duration::from_secs(15);

/// Limit of reading all certificates, during which the lease is not renewed.
const CERTIFICATES_WITHIN: Duration = Duration::from_secs(2);

/// Runs one replica until `stop` completes. `listening` receives the address of the admin port once it is open.
///
/// # Errors
/// The admin port is in use, the lease was lost, or a watch or controller ended unexpectedly.
pub async fn run(
    (client, counts): (Client, ApiRequests),
    settings: Settings,
    listening: impl FnOnce(SocketAddr) -> anyhow::Result<()>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(settings.admin)
        .await
        .with_context(|| format!("cannot listen on {}", settings.admin))?;
    let admin = listener.local_addr()?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), &settings.namespace);
    let account = settings
        .service_account
        .clone()
        .map(|name| Account { api: Api::namespaced(client.clone(), &settings.namespace), name });
    let mut election = Election::new(leases, settings.identity.clone(), account.clone());
    let (stores, writers) = Stores::new();
    let stores = Arc::new(stores);
    let context = Arc::new(Context::new((client.clone(), counts), Arc::clone(&stores), settings));
    let (ready, is_ready) = flag::channel(false);
    let (stopping, is_stopping) = flag::channel(false);
    let (guard, certificate) = guard(&context, admin, account)?;
    // Tasks that need no orderly end.
    let mut tasks = JoinSet::new();
    if let Some(certificate) = certificate {
        tasks.spawn(certificate.keep());
    }
    let limit = admin::connection_limit(&guard, &context.metrics.rejected)?;
    tasks.spawn(admin::serve(listener, (guard, limit), Arc::clone(&context), is_ready));
    let mut watches = watches::start(&client, &stores, writers);
    listening(admin)?;
    let mut stop = std::pin::pin!(stop);
    let begun = async {
        stores.wait_until_ready().await.context("a watch ended")?;
        // Fails only if the admin task has ended. The select below handles that.
        let _ = ready.send(true);
        tracing::info!("ready; waiting for the lease");
        election.acquire().await;
        anyhow::Ok(())
    };
    tokio::select! {
        begun = begun => begun?,
        () = &mut stop => return Ok(()),
    }
    tracing::info!("acquired the lease; starting to reconcile");
    context.metrics.leader.set(1);
    read_certificates(&context).await;
    let mut controllers = start_controllers(&context, &is_stopping);
    stores.reconcile_everything();
    tasks.spawn({
        let context = Arc::clone(&context);
        async move { orphans::run(&context).await }
    });
    let ended = tokio::select! {
        () = &mut stop => Ok(()),
        () = election.renew_until_lost() => Err(anyhow::anyhow!("lost the lease")),
        _ = watches.join_next() => Err(anyhow::anyhow!("a watch ended")),
        // A controller ends if one of its reconciles panics.
        _ = controllers.join_next() => Err(anyhow::anyhow!("a controller ended")),
    };
    tasks.abort_all();
    ended?;
    tracing::info!("stopping; waiting for running reconciles");
    stopping.send(true).context("all controllers ended")?;
    let all_ended = async { while controllers.join_next().await.is_some() {} };
    tokio::select! {
        ended = tokio::time::timeout(STOPS_WITHIN, all_ended) => if ended.is_err() {
            tracing::info!("aborting reconciles that still run; the next replica repeats them");
        },
        () = election.renew_until_lost() => anyhow::bail!("lost the lease"),
    }
    // Before the lease is released, so that they do not write while another replica reconciles.
    controllers.abort_all();
    watches.shutdown().await;
    if let Err(error) = election.release().await {
        tracing::info!(%error, "cannot release the lease; it expires by itself");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Reads the certificates for calls to control planes: nodes and tenants may be reconciled before their clusters.
async fn read_certificates(context: &Context) {
    let clusters = context.stores.clusters.state();
    let names: Vec<ClusterNames> = clusters.iter().map(|cluster| ClusterNames::of(cluster)).collect();
    let read = join_all(names.iter().map(|names| authority::read(names, context)));
    // The reconciles of clusters read those that are missing.
    let _ = tokio::time::timeout(CERTIFICATES_WITHIN, read).await;
}

/// Returns the rules of the admin port, and the certificate to keep for it.
fn guard(
    context: &Context,
    admin: SocketAddr,
    account: Option<Account>,
) -> anyhow::Result<(Guard, Option<AdminCertificate>)> {
    if context.settings.admin_plain {
        anyhow::ensure!(
            admin.ip().to_canonical().is_loopback(),
            "--admin-plain serves {admin}, which is not a loopback address: leave it out, or listen on 127.0.0.1"
        );
        tracing::warn!("connections are plain (--admin-plain): all local callers may read metrics");
        return Ok((Guard::plain(), None));
    }
    let certificate = AdminCertificate::provisional(&context.client, &context.settings.namespace, account)?;
    let security = Security::Tls(certificate.tls().clone());
    Ok((Guard::new(security, scrapers::reviewed(context.client.clone())), Some(certificate)))
}

/// Starts all controllers. They end when `stop` is set, or if a reconcile panics.
fn start_controllers(context: &Arc<Context>, stop: &flag::Receiver<bool>) -> JoinSet<()> {
    let (stores, mut tasks) = (&context.stores, JoinSet::new());
    let (shared, stop) = (|| Arc::clone(context), || stop.clone());
    macro_rules! start {
        ($($kind:ident),+) => {
            $(tasks.spawn(controller::run($kind::controller::controller(stores), $kind::reconcile, shared(), stop()));)+
        };
    }
    start!(cluster, pool, node, tenant, profile, allocation);
    tasks.spawn(controller::run(signing::controller(&context.client), signing::reconcile, shared(), stop()));
    tasks
}
