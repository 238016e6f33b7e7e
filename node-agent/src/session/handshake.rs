//! The handshake of a session: checks protocol version, namespace, layout and tenant.
//!
//! In a cluster, [`super::identity`] verifies the tenant; elsewhere [`super::users`] does, where tenants have users. The namespace of a tenant
//! contains its salt, which the answer hands to the session.
//!
//! A rejected greeting is answered with the reason, then the session ends. The handshake has a deadline.
//! Until it is complete, the connection may be closed to free a place for another one
//! ([`super::listener`]).

use std::io::ErrorKind as IoKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use reprise_agent_core::event::SessionOpened;
use reprise_buffers::{PROGRESS_ENTRIES, PROGRESS_ENTRY_BYTES, ProgressWriter};
use reprise_daemon::rejected_connections::Reason;
use reprise_policy::tenant::TenantError;
use reprise_policy::{
    DevicePlace, Dtype, GpuPlace, Layout, LayoutSpec, NamespaceDigest, Parts, SessionId, TenantId,
    TenantName, TenantSalt,
};
use reprise_proto::local::{self, FailureKind, PROTOCOL_VERSION};

use reprise_agent_core::pool::header::encryption::Groups;

use super::backend::StatedBackend;
use super::frame::{Descriptor, FrameError, FrameReader, Incoming, Limits};
use super::outbound::{self, Outbound};
use super::salts::SaltError;
use super::{Ids, Peer, PublicSalt, Session, SessionContext, encode};

/// Time limit for the whole handshake; clients send the greeting immediately.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a greeting, which bounds the memory of unauthenticated connections. A digest, a layout
/// and a name take about a hundred bytes, a token one to two KiB.
pub(super) const HELLO_BYTES_MAX: usize = 16 << 10;

/// Longer client names are truncated.
const CLIENT_NAME_BYTES_MAX: usize = 64;

/// A session after a successful handshake.
pub(super) struct Handshake {
    pub(super) opened: SessionOpened,
    pub(super) session: Arc<Session>,
    pub(super) progress: ProgressWriter,
    pub(super) frames: FrameReader,
    /// Sent once the core knows the session.
    pub(super) welcome: super::frame::Frame,
}

/// A rejected greeting; the message is for the client and the log.
struct Rejection {
    id: u64,
    kind: FailureKind,
    reason: Reason,
    message: String,
}

/// A greeting whose tenant and GPU exist.
struct Greeting {
    hello: Hello,
    tenant: TenantId,
    salt: Option<TenantSalt>,
    public: Option<(TenantName, PublicSalt)>,
    gpu: Option<DevicePlace>,
}

struct Hello {
    id: u64,
    namespace: NamespaceDigest,
    layout: Layout,
    tenant: TenantName,
    /// Empty if the greeting has no token.
    token: String,
    client_name: String,
    gpu: Option<GpuPlace>,
}

/// Performs the handshake; returns `None` if the session must end.
pub(super) fn perform_handshake(
    context: &SessionContext,
    socket: UnixStream,
    id: SessionId,
    peer: Peer,
) -> Option<Handshake> {
    let mut frames = match prepare(&socket) {
        Ok(frames) => frames,
        Err(error) => {
            context.count_rejected(Reason::System);
            tracing::warn!(session = id.0, %error, "cannot configure the socket of a session");
            return None;
        }
    };
    let greeting = read_hello(&mut frames).and_then(|hello| {
        let gpu = locate_gpu(&context.root, &hello).map_err(Some)?;
        check_identity(context, &hello, peer.ids).map_err(Some)?;
        check_key(context, &hello).map_err(Some)?;
        let salt = find_salt(context, &hello).map_err(Some)?;
        let tenant = bind_tenant(context, &hello, salt.as_ref()).map_err(Some)?;
        let public = find_public(context, &hello);
        Ok(Greeting { hello, tenant, salt, public, gpu })
    });
    let greeting = match greeting {
        Ok(greeting) => greeting,
        Err(None) => return None,
        Err(Some(refused)) => {
            context.count_rejected(refused.reason);
            let kind = refused.reason.as_str();
            tracing::warn!(kind, session = id.0, pid = peer.pid, why = %refused.message, "session rejected");
            // The client may have disconnected; the rejection is logged.
            let _ =
                outbound::send_frame(&socket, encode::failure(refused.id, refused.kind, &refused.message));
            return None;
        }
    };
    open(context, socket, frames, (id, peer, greeting))
}

fn prepare(socket: &UnixStream) -> std::io::Result<FrameReader> {
    socket.set_write_timeout(Some(outbound::SEND_TIMEOUT))?;
    let until = Some(Instant::now() + HELLO_TIMEOUT);
    let limits = Limits { message_bytes: HELLO_BYTES_MAX, until, incoming: Incoming::Refused };
    Ok(FrameReader::new(socket.try_clone()?, limits))
}

fn open(
    context: &SessionContext,
    socket: UnixStream,
    mut frames: FrameReader,
    (id, peer, greeting): (SessionId, Peer, Greeting),
) -> Option<Handshake> {
    let Greeting { hello, tenant, salt, public, gpu } = greeting;
    let (public_tenant, public) = public.unzip();
    let (progress, page) = match progress_page() {
        Ok(made) => made,
        Err(error) => {
            context.count_rejected(Reason::System);
            tracing::error!(session = id.0, %error, "cannot create a progress page for a session: raise the limits on files or memory");
            let message = "the agent cannot create a progress page; see its log";
            let _ = outbound::send_frame(&socket, encode::failure(hello.id, FailureKind::Internal, message));
            return None;
        }
    };
    // From here on there is no deadline between requests.
    let incoming = if context.queue_grants.may_grant() { Incoming::Kept } else { Incoming::Closed };
    frames.set_limits(Limits { incoming, ..Limits::SESSION }).ok()?;
    let welcome = local::Welcome {
        session: id.0,
        node: context.node.clone(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        progress_entries: u32::from(PROGRESS_ENTRIES),
        progress_entry_bytes: u32::try_from(PROGRESS_ENTRY_BYTES).expect("entries are a few KiB"),
        tenant_salt: salt.as_ref().map(|salt| salt.secret().to_vec()).unwrap_or_default().into(),
        public_tenant: public_tenant.map(String::from).unwrap_or_default(),
    };
    let opened = SessionOpened {
        session: id,
        tenant,
        namespace: hello.namespace.of_tenant(salt.as_ref()),
        layout: hello.layout,
        gpu: gpu.clone(),
    };
    let session = Session {
        id,
        tenant,
        peer: Peer {
            client_name: hello.client_name,
            tenant: hello.tenant,
            gpu,
            layout: Some(hello.layout),
            ..peer
        },
        outbound: Outbound::new(socket, context.arena.clone()),
        in_flight: 0.into(),
        is_fenced: false.into(),
        load_blocks_max: encode::load_blocks_max(hello.layout),
        layout: hello.layout,
        namespace: hello.namespace,
        public,
        backend: StatedBackend::default(),
    };
    let welcome = encode::welcome(hello.id, welcome, Descriptor::Progress(page));
    Some(Handshake { opened, session: Arc::new(session), progress, frames, welcome })
}

/// Creates a progress page and its descriptor for the client.
fn progress_page() -> Result<(ProgressWriter, OwnedFd), Box<dyn std::error::Error>> {
    let writer = ProgressWriter::create()?;
    let page = writer.readonly_fd().try_clone_to_owned()?;
    Ok((writer, page))
}

/// Returns where the GPU of a greeting is, if the greeting states one.
fn locate_gpu(root: &Path, hello: &Hello) -> Result<Option<DevicePlace>, Rejection> {
    let place = hello.gpu.map(|gpu| reprise_io::gpu_place(root, gpu)).transpose();
    place.map_err(|message| Rejection {
        id: hello.id,
        kind: FailureKind::BadRequest,
        reason: Reason::Refused,
        message,
    })
}

/// Checks that the session may use its tenant.
fn check_identity(context: &SessionContext, hello: &Hello, ids: Ids) -> Result<(), Rejection> {
    let by_user =
        context.users.check(ids, &hello.tenant).map_err(|message| (FailureKind::BadRequest, message));
    let checked = by_user.and_then(|()| match &context.identity {
        Some(identity) => identity.check(&hello.tenant, &hello.token),
        None => Ok(()),
    });
    checked.map_err(|(kind, message)| Rejection { id: hello.id, kind, reason: Reason::Refused, message })
}

/// Checks that blocks of an encrypted tenant can be encrypted. In a cluster, a missing key may be on its way.
fn check_key(context: &SessionContext, hello: &Hello) -> Result<(), Rejection> {
    let Hello { tenant, layout, .. } = hello;
    let refuse = |kind, message| Err(Rejection { id: hello.id, kind, reason: Reason::Refused, message });
    let kind = if context.identity.is_some() { FailureKind::Busy } else { FailureKind::BadRequest };
    context.keys.learn(tenant);
    match context.keys.of(tenant) {
        None => Ok(()),
        Some(keys) if keys.is_empty() => refuse(
            kind,
            format!(
                "the blocks of tenant '{tenant}' must be encrypted, and this node has no key: create the file '{tenant}' in \
                 the folder encryption.keys of the agent's configuration; in Kubernetes, see keySecretRef of the CacheTenant"
            ),
        ),
        Some(_) if Groups::of(layout).is_none() => refuse(
            FailureKind::BadRequest,
            format!(
                "blocks of {} objects cannot be encrypted, because their tags do not fit: use a tenant without encryption, \
                 or fewer layers in a block",
                layout.objects()
            ),
        ),
        Some(_) => Ok(()),
    }
}

/// Returns the salt of the greeting's tenant. In a cluster, a missing salt may be on its way to this node.
fn find_salt(context: &SessionContext, hello: &Hello) -> Result<Option<TenantSalt>, Rejection> {
    context.salts.of(&hello.tenant).map_err(|error| {
        let (kind, message) = match error {
            SaltError::Missing(message) if context.identity.is_some() => (FailureKind::Busy, message),
            SaltError::Missing(message) | SaltError::Unusable(message) => (FailureKind::BadRequest, message),
        };
        Rejection { id: hello.id, kind, reason: Reason::Refused, message }
    })
}

/// Returns the public tenant and its salt. `None` for sessions of that tenant, without its salt, and if it is encrypted.
fn find_public(context: &SessionContext, hello: &Hello) -> Option<(TenantName, PublicSalt)> {
    let name = context.public_tenant.current().filter(|name| *name != hello.tenant)?;
    context.keys.learn(&name);
    let is_encrypted = context.keys.of(&name).is_some();
    // Before the lock: the core's thread takes it too, and must not wait for a file.
    let salt = context.salts.of(&name);
    let found = match salt {
        // The reader may have no key.
        _ if is_encrypted => {
            Err("it is encrypted, and copies of other tenants would be plaintext".to_owned())
        }
        Ok(Some(salt)) => {
            let mut tenants = context.tenants.lock().expect("no panic while the registry is locked");
            let entered = tenants.enter(&name, None).map_err(|error| error.to_string());
            entered.map(|tenant| PublicSalt { tenant, salt })
        }
        Ok(None) => Err("it has no isolation salt".to_owned()),
        Err(SaltError::Missing(message) | SaltError::Unusable(message)) => Err(message),
    };
    match found {
        Ok(public) => Some((name, public)),
        Err(reason) => {
            if context.public_tenant.is_first_failure() {
                tracing::warn!(tenant = %name, reason, "sessions of this node cannot read blocks of the public tenant");
            }
            None
        }
    }
}

/// Returns the number of the greeting's tenant, if the namespace is not another tenant's.
fn bind_tenant(
    context: &SessionContext,
    hello: &Hello,
    salt: Option<&TenantSalt>,
) -> Result<TenantId, Rejection> {
    let mut tenants = context.tenants.lock().expect("no panic while the registry is locked");
    tenants.bind(&hello.tenant, &hello.namespace.of_tenant(salt)).map_err(|error| {
        let kind = match error {
            TenantError::Full(_) | TenantError::Offered(_) => FailureKind::Busy,
            TenantError::Name(_)
            | TenantError::Number { .. }
            | TenantError::Renumbered { .. }
            | TenantError::Namespace { .. } => FailureKind::BadRequest,
        };
        Rejection { id: hello.id, kind, reason: Reason::Refused, message: error.to_string() }
    })
}

/// `Err(None)`: the client disconnected without a message.
fn read_hello(frames: &mut FrameReader) -> Result<Hello, Option<Rejection>> {
    let refuse = |id, reason, message: String| {
        Err(Some(Rejection { id, kind: FailureKind::BadRequest, reason, message }))
    };
    let frame = match frames.next_frame() {
        Ok(Some(frame)) => frame,
        Ok(None) => return Err(None),
        Err(FrameError::TooLong(bytes)) => {
            return refuse(
                0,
                Reason::Protocol,
                format!(
                    "a greeting of {bytes} bytes exceeds the limit of {HELLO_BYTES_MAX}: the client may use another protocol"
                ),
            );
        }
        // Error kinds of a read that timed out, socket(7).
        Err(FrameError::Io(error)) if matches!(error.kind(), IoKind::TimedOut | IoKind::WouldBlock) => {
            return refuse(0, Reason::Timeout, format!("no greeting within {HELLO_TIMEOUT:?}"));
        }
        Err(FrameError::Io(error)) => {
            return refuse(0, Reason::Protocol, format!("cannot read the greeting: {error}"));
        }
    };
    match local::Request::decode(frame) {
        Ok(local::Request { id, body: Some(local::request::Body::Hello(hello)) }) if id > 0 => {
            check(id, hello)
                .map_err(|(kind, message)| Some(Rejection { id, kind, reason: Reason::Refused, message }))
        }
        Ok(local::Request { id, .. }) => refuse(
            id,
            Reason::Protocol,
            "the first message of a session must be hello with an id above 0".to_owned(),
        ),
        Err(error) => refuse(
            0,
            Reason::Protocol,
            format!("invalid message, expected a request of the session protocol: {error}"),
        ),
    }
}

fn check(id: u64, hello: local::Hello) -> Result<Hello, (FailureKind, String)> {
    if hello.protocol_version != PROTOCOL_VERSION {
        let message = format!(
            "the client uses session protocol {}, the agent {PROTOCOL_VERSION}: use a client and an agent of the same release",
            hello.protocol_version
        );
        return Err((FailureKind::Version, message));
    }
    let bad = |message: String| (FailureKind::BadRequest, message);
    let namespace = <[u8; 32]>::try_from(hello.namespace.as_ref()).map_err(|_| {
        bad(format!("invalid namespace of {} bytes: expected a SHA-256 digest of 32", hello.namespace.len()))
    })?;
    let layout = hello.layout.ok_or_else(|| bad("missing layout".to_owned()))?;
    let layout = convert_layout(&layout).map_err(bad)?;
    let tenant = hello.tenant.parse().map_err(|error: TenantError| bad(error.to_string()))?;
    let client_name = cut(hello.client_name, CLIENT_NAME_BYTES_MAX);
    let token = hello.service_account_token;
    let gpu = hello.gpu.map(stated_gpu).transpose().map_err(bad)?;
    Ok(Hello { id, namespace: NamespaceDigest(namespace), layout, tenant, token, client_name, gpu })
}

/// Checks the fields of a greeting, for the fuzz targets.
#[cfg(test)]
pub(super) fn check_fields(hello: local::Hello) {
    if let Err((_, message)) = check(1, hello) {
        assert!(!message.is_empty());
    }
}

fn stated_gpu(gpu: local::hello::Gpu) -> Result<GpuPlace, String> {
    match gpu {
        local::hello::Gpu::GpuPciAddress(text) => {
            text.parse().map(GpuPlace::Pci).map_err(|error| format!("place of the GPU: {error}"))
        }
        local::hello::Gpu::GpuNumaNode(node) => Ok(GpuPlace::NumaNode(node)),
    }
}

fn convert_layout(layout: &local::Layout) -> Result<Layout, String> {
    let field = |name: &str, value: u32| {
        u16::try_from(value).map_err(|_| format!("layout: '{name}' = {value} exceeds {}", u16::MAX))
    };
    let parts = u8::try_from(layout.parts).ok().and_then(Parts::from_wire);
    let dtype = u8::try_from(layout.dtype).ok().and_then(Dtype::from_wire);
    let spec = LayoutSpec {
        layers: field("layers", layout.layers)?,
        parts: parts.ok_or_else(|| {
            format!("layout: invalid 'parts' = {}: expected 1 (latent) or 2 (keys and values)", layout.parts)
        })?,
        kv_heads: field("kv_heads", layout.kv_heads)?,
        head_dim: field("head_dim", layout.head_dim)?,
        dtype: dtype.ok_or_else(|| format!("layout: unknown 'dtype' = {}", layout.dtype))?,
        tokens_per_block: field("tokens_per_block", layout.tokens_per_block)?,
        tp_rank: field("tp_rank", layout.tp_rank)?,
        tp_size: field("tp_size", layout.tp_size)?,
    };
    spec.validate().map_err(|error| error.to_string())
}

/// Truncates `text` to at most `bytes_max` bytes at a character boundary.
fn cut(mut text: String, bytes_max: usize) -> String {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> local::Hello {
        let layout = local::Layout {
            layers: 2,
            parts: 2,
            kv_heads: 1,
            head_dim: 64,
            dtype: 1,
            tokens_per_block: 16,
            tp_rank: 0,
            tp_size: 1,
        };
        local::Hello {
            protocol_version: PROTOCOL_VERSION,
            namespace: vec![1; 32].into(),
            layout: Some(layout),
            client_name: "test".to_owned(),
            tenant: String::new(),
            service_account_token: String::new(),
            gpu: None,
        }
    }

    fn refused(change: impl FnOnce(&mut local::Hello)) -> (FailureKind, String) {
        let mut greeting = hello();
        change(&mut greeting);
        check(1, greeting).err().expect("refused")
    }

    #[test]
    fn valid_greeting_is_accepted() {
        let greeting = match check(1, hello()) {
            Ok(greeting) => greeting,
            Err((_, message)) => panic!("refused: {message}"),
        };
        assert_eq!((greeting.layout.objects(), greeting.namespace.0), (4, [1; 32]));
        assert_eq!(
            greeting.tenant,
            TenantName::default_tenant(),
            "a greeting without a tenant gets the default tenant"
        );
    }

    #[test]
    fn rejection_of_another_version_contains_both_versions() {
        let (kind, message) = refused(|hello| hello.protocol_version = 77);
        assert_eq!(kind, FailureKind::Version);
        assert!(message.contains("77") && message.contains(&PROTOCOL_VERSION.to_string()), "{message}");
    }

    #[test]
    fn invalid_namespace_and_layout_are_rejected_by_field() {
        assert!(refused(|hello| hello.namespace = vec![1; 31].into()).1.contains("31"));
        assert!(refused(|hello| hello.layout = None).1.contains("layout"));
        assert!(
            refused(|hello| hello.tenant = "Team A".to_owned()).1.contains("invalid tenant name 'Team A'")
        );
        let with =
            |change: fn(&mut local::Layout)| refused(|hello| change(hello.layout.as_mut().expect("set"))).1;
        assert!(with(|layout| layout.layers = 0).contains("layers"));
        assert!(with(|layout| layout.kv_heads = 70_000).contains("kv_heads"));
        assert!(with(|layout| layout.parts = 3).contains("parts"));
        assert!(with(|layout| layout.dtype = 99).contains("dtype"));
        assert!(with(|layout| layout.tp_rank = 1).contains("tp_rank"));
    }

    #[test]
    fn stated_gpu_must_be_a_function_of_this_node() {
        let root = tempfile::tempdir().expect("a folder");
        let function = root.path().join("sys/devices/pci0000:3a/0000:3b:00.0");
        std::fs::create_dir_all(&function).expect("a folder");
        let bus = root.path().join("sys/bus/pci/devices");
        std::fs::create_dir_all(&bus).expect("a folder");
        std::os::unix::fs::symlink(&function, bus.join("0000:3b:00.0")).expect("a link");
        let locate = |gpu| {
            let mut greeting = hello();
            greeting.gpu = gpu;
            let Ok(greeting) = check(1, greeting) else { panic!("rejected") };
            locate_gpu(root.path(), &greeting).map_err(|rejection| rejection.message)
        };
        let at = |address: &str| Some(local::hello::Gpu::GpuPciAddress(address.to_owned()));
        assert_eq!(locate(None), Ok(None), "no place is guessed");
        let place = DevicePlace { root: Some("pci0000:3a".to_owned()), numa_node: None };
        // The form of CUDA.
        assert_eq!(locate(at("00000000:3B:00.0")), Ok(Some(place)));
        let message = locate(at("0000:3c:00.0")).expect_err("missing");
        assert!(message.contains("0000:3c:00.0") && message.contains("or none"), "{message}");
        let message = locate(Some(local::hello::Gpu::GpuNumaNode(7))).expect_err("missing");
        assert!(message.contains("NUMA node 7"), "{message}");
        let (kind, message) = refused(|hello| hello.gpu = at("3b:00.0"));
        assert_eq!(kind, FailureKind::BadRequest);
        assert!(message.contains("for example 0000:3b:00.0"), "{message}");
    }

    #[test]
    fn long_name_is_truncated_at_a_character_boundary() {
        assert_eq!(cut("é".repeat(40), 63).len(), 62);
        assert_eq!(cut("ab".to_owned(), 63), "ab");
    }
}
