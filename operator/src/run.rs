//! One replica of the operator, from its start to its end.
//!
//! In order: the admin port, the watches, the lease, the queues. A replica that waits for the lease has filled its stores, so that it takes over
//! at once. On SIGTERM the queues end what runs, while the lease is still renewed, and then it is given up. A lease that is lost ends the process
//! without more: another one works already.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::sync::watch as flag;

use crate::context::Context;
use crate::lease::{Account, Election};
use crate::requests::ApiRequests;
use crate::settings::Settings;
use crate::watch::{Requests, Triggers};
use crate::world::World;
use crate::{admin, allocation, cluster, node, pool, profile, queue, sweep, tenant, watch};

/// What runs may take so long to its end; the kubelet kills a pod after 30 s, which a test of the chart compares with this line, and the lease is
/// given up in between.
const STOPS_WITHIN: Duration = Duration::from_secs(15);

/// What a replica says once it serves its admin port.
#[derive(Clone, Copy, Debug)]
pub struct Listening {
    /// Where.
    pub admin: std::net::SocketAddr,
}

/// Runs until `stop` is done, with a client and the count of what it asks.
///
/// # Errors
/// The admin port is taken, the lease was lost, or a watch or a queue has ended, which none does.
pub async fn run(
    (client, counts): (Client, ApiRequests),
    settings: Settings,
    listening: impl FnOnce(Listening) -> anyhow::Result<()>,
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
    let mut election = Election::new(leases, settings.identity.clone(), account);
    let (world, writers) = World::new();
    let world = Arc::new(world);
    let (triggers, requests) = Triggers::new();
    let triggers = Arc::new(triggers);
    let counted = (client.clone(), counts);
    let context = Context::new(counted, Arc::clone(&world), Arc::clone(&triggers), settings);
    let context = Arc::new(context);
    let (ready, is_ready) = flag::channel(false);
    let (stopping, is_stopping) = flag::channel(false);
    let limit = admin::connection_limit(&context.metrics.rejected)?;
    let serving = tokio::spawn(admin::serve(listener, limit, Arc::clone(&context), is_ready));
    let mut watches = watch::start(&client, &world, writers, &triggers);
    listening(Listening { admin })?;
    let mut stop = std::pin::pin!(stop);
    let begun = async {
        world.ready().await.context("a watch has ended")?;
        // Nobody listens when the port was closed; that ends the process below.
        let _ = ready.send(true);
        tracing::info!("ready; waiting for the lease");
        election.won().await;
        anyhow::Ok(())
    };
    tokio::select! {
        begun = begun => begun?,
        () = &mut stop => return Ok(()),
    }
    tracing::info!("this replica holds the lease and works");
    context.metrics.leader.set(1);
    triggers_open(&triggers, &world);
    let mut queues = start_queues(&context, requests, &is_stopping);
    let sweeping = tokio::spawn({
        let context = Arc::clone(&context);
        async move { sweep::run(&context).await }
    });
    world.orphaned();
    let ended = tokio::select! {
        () = &mut stop => Ok(()),
        () = election.lost() => Err(anyhow::anyhow!("the lease is lost")),
        _ = watches.join_next() => Err(anyhow::anyhow!("a watch has ended")),
        // As one does whose reconcile has panicked.
        _ = futures_util::future::select_all(&mut queues) => Err(anyhow::anyhow!("a queue has ended")),
    };
    sweeping.abort();
    serving.abort();
    ended?;
    tracing::info!("stopping: what runs is ended first");
    stopping.send(true).context("the queues have ended")?;
    let aborts: Vec<_> = queues.iter().map(tokio::task::JoinHandle::abort_handle).collect();
    tokio::select! {
        _ = futures_util::future::join_all(queues) => {}
        () = tokio::time::sleep(STOPS_WITHIN) => {
            tracing::info!("what still runs is given up; the next replica does it again");
            // Before the lease is: nothing of it is written once another replica works.
            aborts.iter().for_each(tokio::task::AbortHandle::abort);
        }
        () = election.lost() => anyhow::bail!("the lease is lost"),
    }
    watches.shutdown().await;
    if let Err(error) = election.release().await {
        tracing::info!(%error, "the lease runs out by itself");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Asks for everything, beside what the watches ask for.
fn triggers_open(triggers: &Arc<Triggers>, world: &Arc<World>) {
    let (triggers, world) = (Arc::clone(triggers), Arc::clone(world));
    tokio::spawn(async move { triggers.open(&world).await });
}

fn start_queues(
    context: &Arc<Context>,
    requests: Requests,
    stop: &flag::Receiver<bool>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let world = &context.world;
    let (shared, stop) = (|| Arc::clone(context), || stop.clone());
    vec![
        tokio::spawn(queue::run(
            world.clusters.clone(),
            requests.clusters,
            cluster::reconcile,
            shared(),
            stop(),
        )),
        tokio::spawn(queue::run(world.pools.clone(), requests.pools, pool::reconcile, shared(), stop())),
        tokio::spawn(queue::run(world.nodes.clone(), requests.nodes, node::reconcile, shared(), stop())),
        tokio::spawn(queue::run(
            world.tenants.clone(),
            requests.tenants,
            tenant::reconcile,
            shared(),
            stop(),
        )),
        tokio::spawn(queue::run(
            world.profiles.clone(),
            requests.profiles,
            profile::reconcile,
            shared(),
            stop(),
        )),
        tokio::spawn(queue::run(
            world.allocations.clone(),
            requests.allocations,
            allocation::reconcile,
            shared(),
            stop(),
        )),
    ]
}
