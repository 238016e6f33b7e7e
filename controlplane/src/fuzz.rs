//! Fuzz targets of a member (`make fuzz`): requests of agents, its configuration, records of the store, subscribers of events.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use reprise_controlplane_store::{KeyValue, Revision};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::store_keys::Family;
use crate::{config, directory, events, membership, modes, placement, registry, shards, tenants};

#[test]
fn member_requests() {
    let seeds = [directory::fuzz::seed(), membership::fuzz::seed(), placement::fuzz::seed()].concat();
    reprise_fuzz::check("member_requests", &seeds, |input| {
        let Some((kind, message)) = input.split_first() else { return };
        match kind % 4 {
            0 => directory::fuzz::update(message),
            1 => membership::fuzz::register(message),
            2 => placement::fuzz::report(message),
            _ => placement::fuzz::place(message),
        }
    });
}

#[test]
fn member_config() {
    let seeds = [
        config::DEFAULT_CONFIG.as_bytes().to_vec(),
        b"[store]\nkind = 'etcd'\nendpoints = ['http://a:1']".to_vec(),
    ];
    reprise_fuzz::check("member_config", &seeds, |input| {
        let Ok(text) = std::str::from_utf8(input) else { return };
        if let Err(error) = config::Config::parse(text) {
            assert!(!error.to_string().is_empty());
        }
    });
}

#[test]
fn member_records() {
    let seeds = [
        &b"\x00a{\"node\":1,\"epoch\":2,\"peer_endpoints\":[{\"protocol\":\"tcp\",\"address\":\"a:1\"}],\
           \"admin_address\":\"a:2\",\"failure_domain\":\"\",\"version\":\"1\"}"[..],
        b"\x01a{\"mode\":\"draining\"}",
        b"\x02a{\"address\":\"a:1\",\"version\":\"1\"}",
        b"\x03a{\"dram_reserved\":0,\"dram_limit\":9,\"nvme_reserved\":0,\"nvme_limit\":9}",
    ];
    reprise_fuzz::check("member_records", &seeds.map(<[u8]>::to_vec), record);
}

#[test]
fn event_subscribers() {
    reprise_fuzz::check("event_subscribers", &events::fuzz::seeds(), events::fuzz::run);
}

/// Decodes a record of the store, as any program with access to the store may have written it.
fn record(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let family = Family::ALL[usize::from(kind % 4)];
    let (name, value) = rest.split_at(rest.len().min(1 + usize::from(kind / 16)));
    let key = [family.prefix().as_bytes(), name].concat();
    let entry = KeyValue {
        key,
        value: value.to_vec(),
        created: Revision(1),
        modified: Revision(2),
        version: 1,
        lease: None,
    };
    match family {
        Family::Nodes => _ = registry::read(&entry),
        Family::Modes => _ = modes::read(&entry),
        Family::Members => _ = shards::read(&entry),
        Family::Tenants => _ = tenants::read(&entry),
    }
}

/// A stream whose input is all there, and whose output is dropped.
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl AsyncRead for Bytes<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let (now, later) = self.0.split_at(self.0.len().min(into.remaining()));
        into.put_slice(now);
        self.0 = later;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Bytes<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Result of a future over [`Bytes`], which never waits.
pub(crate) fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits, and all bytes are there"),
    }
}
