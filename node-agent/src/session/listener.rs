//! The unix socket that engines connect to.
//!
//! The socket is created under a temporary name and renamed once it listens and has its mode bits. An
//! existing file is replaced only if it is a socket on which no process listens. The file system controls
//! access, and the agent checks the user id that the kernel reports.
//!
//! Stopping does not rely on the name, since the file may have been removed or replaced by another agent's.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind as IoKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use reprise_buffers::peer_credentials;
use reprise_daemon::rejected_connections::{Listener, Reason};
use reprise_policy::connection_table::{Admission, ConnectionId, ConnectionTable};
use reprise_policy::{SessionId, TenantName};

use super::handshake::{Handshake, perform_handshake};
use super::{Ids, Peer, SessionContext, encode, outbound, read_requests};
use crate::config::SessionSettings;
use crate::core_loop::{Input, NewSession};
use crate::error::{AgentError, ErrorKind};
use reprise_proto::local::FailureKind;

/// Pause after a failed accept, which usually lacks descriptors until sessions end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long to wait for the end of connections that were closed to free a place.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// Settings of the session server.
pub(crate) struct SessionServerSettings {
    pub(crate) session: SessionSettings,
    /// Maximum number of connections, including those in their handshake.
    pub(crate) sessions_max: usize,
    pub(crate) context: Arc<SessionContext>,
}

/// The listening socket and its thread.
pub(crate) struct SessionServer {
    path: PathBuf,
    file: FileId,
    /// A copy of the listening socket that can be shut down.
    listening: UnixStream,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

/// A listening socket and its file.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    file: FileId,
}

/// Identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

struct Shared {
    context: Arc<SessionContext>,
    allowed: Vec<u32>,
    stopping: AtomicBool,
    next_id: AtomicU64,
    sessions_max: usize,
    /// Connections in their handshake, with a copy of their socket so that they can be closed, and
    /// sessions, which are busy.
    connections: Mutex<ConnectionTable<UnixStream>>,
    /// Notified when a connection has ended.
    ended: Condvar,
}

/// The place of a connection, which is freed on drop.
struct Place {
    shared: Arc<Shared>,
    id: ConnectionId,
}

impl SessionServer {
    /// Creates the socket and starts accepting.
    ///
    /// # Errors
    /// `ErrorKind::Resource`: the directory is missing or not writable, another file has the name, or
    /// another process listens.
    pub(crate) fn start(settings: SessionServerSettings) -> Result<SessionServer, AgentError> {
        let SessionServerSettings { session, sessions_max, context } = settings;
        let Bound { listener, file } = bind(&session)?;
        let listening = listener.try_clone().map(|listener| UnixStream::from(OwnedFd::from(listener)));
        let listening = listening.map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot duplicate a descriptor").with_source(error)
        })?;
        let allowed = match session.allow_uids {
            Some(listed) => listed,
            None => vec![own_uid()?, 0],
        };
        let shared = Arc::new(Shared {
            context,
            allowed,
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            sessions_max,
            connections: Mutex::new(ConnectionTable::new(sessions_max)),
            ended: Condvar::new(),
        });
        let accepting = spawn("sessions", {
            let shared = shared.clone();
            move || accept(&listener, &shared)
        })
        .map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn the accepting thread").with_source(error)
        })?;
        Ok(SessionServer { path: session.socket, file, listening, shared, accepting: Some(accepting) })
    }

    /// Stops accepting; open sessions continue.
    pub(crate) fn stop_accepting(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux, accept(2) then fails with EINVAL and pending connections are refused. It does not fail
        // for a listening socket.
        if let Err(error) = self.listening.shutdown(Shutdown::Both) {
            tracing::error!(%error, "cannot shut down the session socket");
        }
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
        self.file.remove(&self.path);
    }
}

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
    }

    /// Removes the file at `path` if it is this one.
    fn remove(self, path: &Path) {
        let removed = FileId::of(path).and_then(|found| {
            if found == self {
                return fs::remove_file(path);
            }
            tracing::info!(path = %path.display(), "not removing the session socket: its name belongs to another file");
            Ok(())
        });
        match removed {
            Err(error) if error.kind() == IoKind::NotFound => {
                tracing::info!(path = %path.display(), "the session socket was already removed");
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove the session socket");
            }
            Ok(()) => {}
        }
    }
}

/// Spawns a named thread; names appear in `top -H` and in core dumps.
fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    for connection in listener.incoming() {
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        match connection {
            Ok(socket) => {
                admit(shared, socket);
                shared.wait_for_closing();
            }
            Err(error) => {
                shared.context.count_rejected(Reason::System);
                tracing::warn!(listener = Listener::Sessions.as_str(), %error, "cannot accept a connection");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Checks the user and the number of connections, then serves the session on separate threads.
fn admit(shared: &Arc<Shared>, socket: UnixStream) {
    let peer = match peer_credentials(socket.as_fd()) {
        Ok(credentials) => Peer {
            client_name: String::new(),
            tenant: TenantName::default_tenant(),
            pid: credentials.pid,
            ids: Ids { uid: credentials.uid, gid: credentials.gid },
            gpu: None,
            layout: None,
        },
        Err(error) => {
            shared.context.count_rejected(Reason::System);
            tracing::warn!(%error, "session rejected: cannot read the credentials of the client");
            return;
        }
    };
    let uid = peer.ids.uid;
    if !shared.allowed.contains(&uid) && shared.context.users.tenant_of(peer.ids).is_none() {
        let message = format!(
            "user {uid} may not use this agent; add it to session.allow_uids, or to the `uids` of a tenant"
        );
        refuse(shared, &socket, &peer, (Reason::Refused, FailureKind::BadRequest, &message));
        return;
    }
    let place = match shared.place(&socket) {
        Ok(Some(place)) => place,
        Ok(None) => {
            let message = format!("the limit of {} sessions is reached", shared.sessions_max);
            refuse(shared, &socket, &peer, (Reason::Full, FailureKind::Busy, &message));
            return;
        }
        Err(error) => {
            let message = format!("the agent has no free file descriptor: {error}");
            refuse(shared, &socket, &peer, (Reason::System, FailureKind::Busy, &message));
            return;
        }
    };
    // Ids are never reused, so a late event of an ended session cannot affect another one.
    let id = SessionId(shared.next_id.fetch_add(1, Ordering::Relaxed));
    let started = spawn(&format!("session-{id}-in"), move || serve(&place, socket, id, peer));
    if let Err(error) = started {
        shared.context.count_rejected(Reason::System);
        tracing::warn!(%error, "session rejected: cannot spawn a thread");
    }
}

impl Shared {
    /// Reserves a place for a connection. If none is free, the oldest connection in its handshake is
    /// closed; returns `None` if all are sessions. Sessions are never closed for this, as an engine may be
    /// idle for a long time.
    fn place(self: &Arc<Shared>, socket: &UnixStream) -> io::Result<Option<Place>> {
        let admission = self.connections().admit(socket.try_clone()?);
        let id = match admission {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                self.context.count_rejected(Reason::Idle);
                // Its thread reads the end of the stream. The call fails if the client has closed the
                // connection.
                let _ = closed.shutdown(Shutdown::Both);
                id
            }
            Admission::Full(_) => return Ok(None),
        };
        Ok(Some(Place { shared: Arc::clone(self), id }))
    }

    /// Waits until connections closed to free a place have ended, so that their descriptors are free.
    fn wait_for_closing(&self) {
        let waits = |table: &mut ConnectionTable<UnixStream>| table.must_wait();
        // Without a limit, a hung thread would block all new connections.
        drop(self.ended.wait_timeout_while(self.connections(), CLOSED_WITHIN, waits));
    }

    /// Every change leaves the table consistent, so a poisoned lock is ignored.
    fn connections(&self) -> MutexGuard<'_, ConnectionTable<UnixStream>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Keeps the place until the session ends; returns false if it was given to another connection.
    fn keep(&self) -> bool {
        self.shared.connections().set_busy(self.id)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.connections().remove(self.id);
        self.shared.ended.notify_one();
    }
}

/// Rejects a connection with a reason.
fn refuse(
    shared: &Shared,
    socket: &UnixStream,
    peer: &Peer,
    (reason, kind, message): (Reason, FailureKind, &str),
) {
    shared.context.count_rejected(reason);
    let Peer { pid, ids: Ids { uid, .. }, .. } = peer;
    tracing::warn!(kind = reason.as_str(), pid, uid, why = message, "session rejected");
    // The accepting thread must not block; the buffer of a new socket holds a failure message.
    let _ = socket.set_nonblocking(true);
    let _ = outbound::send_frame(socket, encode::failure(0, kind, message));
}

/// Serves one session from its handshake to its end.
fn serve(place: &Place, socket: UnixStream, id: SessionId, peer: Peer) {
    let context = &place.shared.context;
    let _session = tracing::info_span!("session", id = id.0, pid = peer.pid, uid = peer.ids.uid).entered();
    let Some(greeted) = perform_handshake(context, socket, id, peer) else { return };
    let Handshake { opened, session, progress, mut frames, welcome } = greeted;
    if !place.keep() {
        // The connection was closed to free a place during its handshake.
        return;
    }
    let Peer { client_name, tenant, .. } = session.peer();
    tracing::info!(client = %client_name, %tenant, "session opened");
    let writer = spawn(&format!("session-{id}-out"), {
        let session = session.clone();
        move || session.outbound.write_queued()
    });
    let writer = match writer {
        Ok(writer) => writer,
        Err(error) => {
            context.count_rejected(Reason::System);
            tracing::warn!(%error, "session rejected: cannot spawn a thread");
            return;
        }
    };
    let opened = NewSession { opened, session: session.clone(), progress };
    if context.inbox.send(Input::SessionOpened(Box::new(opened))).is_ok() {
        session.outbound.send(outbound::Outgoing::Frame(welcome));
        // If the keys were removed before the core knew this session, it has not ended it.
        if context.keys.are_missing(tenant) {
            session.end(&format!("the encryption keys of tenant '{tenant}' were removed from this node"));
        }
        read_requests(context, &session, &mut frames);
    }
    // A client that closes its sending side ends the session. A rejected client must still receive the
    // reason.
    if !session.outbound.is_closing() {
        session.close();
    }
    let _ = writer.join();
    tracing::info!("session closed");
}

/// Returns the user id of this process, which owns `/proc/self`.
pub(crate) fn own_uid() -> Result<u32, AgentError> {
    fs::metadata("/proc/self").map(|metadata| metadata.uid()).map_err(|error| {
        AgentError::new(ErrorKind::Resource, "cannot read /proc/self; list session.allow_uids instead")
            .with_source(error)
    })
}

/// Creates the listening socket with its final name and mode.
fn bind(settings: &SessionSettings) -> Result<Bound, AgentError> {
    let path = &settings.socket;
    let refuse = |what: String| {
        AgentError::new(ErrorKind::Resource, format!("session.socket '{}': {what}", path.display()))
    };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(refuse(format!("'{}' is not a directory", directory.display()))),
        Err(error) => {
            let what = format!(
                "cannot use directory '{}'; create it, writable by the agent's user",
                directory.display()
            );
            return Err(refuse(what).with_source(error));
        }
    }
    make_way(path).map_err(refuse)?;
    let mut fresh = path.clone().into_os_string();
    fresh.push(".new");
    publish(Path::new(&fresh), path, settings.mode).map_err(|error| {
        let what = match error.kind() {
            IoKind::PermissionDenied | IoKind::ReadOnlyFilesystem => {
                format!(
                    "cannot create a socket in '{}'; it must be writable by the agent's user",
                    directory.display()
                )
            }
            _ => "cannot listen".to_owned(),
        };
        refuse(what).with_source(error)
    })
}

fn publish(fresh: &Path, path: &Path, mode: u32) -> io::Result<Bound> {
    // A killed agent may have left its temporary socket.
    match fs::remove_file(fresh) {
        Err(error) if error.kind() != IoKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(fresh)?;
    let published = fs::set_permissions(fresh, Permissions::from_mode(mode)).and_then(|()| {
        // Read before the rename: afterwards the name may already belong to another file.
        let file = FileId::of(fresh)?;
        fs::rename(fresh, path)?;
        Ok(file)
    });
    match published {
        Ok(file) => Ok(Bound { listener, file }),
        Err(error) => {
            let _ = fs::remove_file(fresh);
            Err(error)
        }
    }
}

/// Checks whether an existing file with this name may be replaced.
fn make_way(path: &Path) -> Result<(), String> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == IoKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("cannot examine the existing file: {error}")),
    };
    if !metadata.file_type().is_socket() {
        return Err("a file that is not a socket has this name; move it or choose another name".to_owned());
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("another process listens there; stop it or choose another name".to_owned()),
        Err(error) if error.kind() == IoKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing the socket of an agent that no longer runs");
            Ok(())
        }
        Err(error) => Err(format!("cannot determine whether a process listens there: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
    use reprise_daemon::rejected_connections::RejectedConnections;

    use reprise_policy::queue_grants::QueueGrantLimits;

    use super::*;
    use crate::core_loop::Inbox;
    use crate::public_tenant::PublicTenant;
    use crate::queue_grants::QueueGrantService;
    use crate::session::{SESSIONS_MAX, TenantSalts, TenantUsers};

    /// Limits of an agent that grants no queue pairs.
    const NO_QUEUES: QueueGrantLimits =
        QueueGrantLimits { pairs_per_device: 0, pairs_per_session: 0, depth: 64 };

    fn settings(directory: &Path) -> SessionSettings {
        SessionSettings {
            socket: directory.join("agent.sock"),
            mode: 0o640,
            allow_uids: None,
            users: TenantUsers::default(),
            salts: None,
            queue_grants: NO_QUEUES,
        }
    }

    #[test]
    fn socket_has_its_mode_bits_and_a_stale_one_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let settings = settings(directory.path());
        drop(bind(&settings).expect("first"));
        let second = bind(&settings).expect("the first one has ended, so its file is stale");
        let mode = fs::metadata(&settings.socket).expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let error = bind(&settings).expect_err("the second listens").chain();
        assert!(error.contains("another process listens"), "{error}");
        drop(second);
    }

    fn server(directory: &Path) -> SessionServer {
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let context = SessionContext {
            inbox: Inbox::new().0,
            arena: Arc::new(Arena::new(&config).expect("an arena of 2 MiB")),
            node: "test".to_owned(),
            root: "/".into(),
            identity: None,
            users: TenantUsers::default(),
            salts: TenantSalts::default(),
            keys: crate::encryption::EncryptionKeys::default(),
            public_tenant: PublicTenant::default(),
            tenants: Arc::default(),
            draining: AtomicBool::new(false),
            rejected: RejectedConnections::default(),
            slack: crate::slack::ActiveProfiles::default(),
            queue_grants: Arc::new(QueueGrantService::new(NO_QUEUES)),
            recorder: Arc::new(crate::recorder::Recorder::new("test".to_owned())),
        };
        let settings = SessionServerSettings {
            session: settings(directory),
            sessions_max: SESSIONS_MAX,
            context: Arc::new(context),
        };
        SessionServer::start(settings).expect("the server starts")
    }

    /// Stops a server; panics if it does not end in time.
    fn stop(mut server: SessionServer) {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            server.stop_accepting();
            done.send(()).expect("the test waits");
        });
        ended.recv_timeout(Duration::from_secs(10)).expect("the server ends promptly");
    }

    #[test]
    fn server_stops_without_its_file_and_does_not_remove_another() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = settings(directory.path()).socket;
        stop(server(directory.path()));
        assert!(!socket.exists());
        let first = server(directory.path());
        fs::remove_file(&socket).expect("the file exists");
        let second = server(directory.path());
        stop(first);
        assert!(UnixStream::connect(&socket).is_ok(), "the second server listens");
        fs::remove_file(&socket).expect("the second server's file exists");
        stop(second);
    }

    #[test]
    fn existing_file_and_missing_directory_are_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut settings = settings(directory.path());
        fs::write(&settings.socket, b"precious").expect("written");
        assert!(bind(&settings).expect_err("in the way").chain().contains("not a socket"));
        assert_eq!(fs::read(&settings.socket).expect("still there"), b"precious");
        settings.socket = directory.path().join("missing/agent.sock");
        assert!(bind(&settings).expect_err("missing").chain().contains("create it"));
    }
}
