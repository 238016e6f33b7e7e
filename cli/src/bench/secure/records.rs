//! Encryption and decryption of full records on one core: the upper bound of a connection's rate.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use anyhow::{Context, anyhow};
use reprise_identity::Expected;
use reprise_identity::blocking::{Channel, Wire};
use reprise_identity::records::{Opened, Opener, RECORD_PLAIN_BYTES_MAX, SEALED_BYTES_MAX};
use reprise_identity::tls::TlsError;
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Spread, Target, median};

/// Records of one measurement: 256 MiB.
const RECORDS: usize = 16 << 10;

/// Records that are encrypted before they are decrypted: 256 KiB, which stay in the second-level cache, as on a
/// connection.
const BATCH: usize = 16;

/// Measures both directions of a record.
pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let (mut sender, mut receiver) = connected()?;
    let (mut sealed, mut opened) = (Vec::new(), Vec::new());
    for _ in settings.rounds("secure.records") {
        let (seal, open) = measure(&mut sender, &mut receiver)?;
        sealed.push(seal);
        opened.push(open);
    }
    let figure = |name, rates: Vec<f64>| {
        let spread = Spread::of(&rates);
        Figure { spread, ..Figure::absolute(name, median(rates), "GB/s", Target::None) }
    };
    Ok(vec![figure("secure.seal_record", sealed), figure("secure.open_record", opened)])
}

/// Returns the rates of encryption and decryption in GB/s.
fn measure(sender: &mut Channel, receiver: &mut Channel) -> anyhow::Result<(f64, f64)> {
    let (mut sealing, mut opening) = (0.0, 0.0);
    let mut records = vec![0; BATCH * SEALED_BYTES_MAX];
    for _ in 0..RECORDS / BATCH {
        let started = Instant::now();
        let mut end = 0;
        for _ in 0..BATCH {
            // The old bytes are the content: its copy is not measured.
            end += sender.sealer.seal(&mut records[end..], |plain| plain.len())?;
        }
        let sealed = Instant::now();
        let mut rest = &mut records[..end];
        while let Some(bytes) = Opener::record_bytes(rest)? {
            let (record, behind) = rest.split_at_mut(bytes);
            if receiver.opener.open(record)? == Opened::Closed {
                return Err(anyhow!("a record ends the connection"));
            }
            rest = behind;
        }
        sealing += (sealed - started).as_secs_f64();
        opening += sealed.elapsed().as_secs_f64();
    }
    let bytes = (RECORDS * RECORD_PLAIN_BYTES_MAX) as f64 / 1e9;
    Ok((bytes / sealing, bytes / opening))
}

/// Both ends of a connection, whose records need no socket.
fn connected() -> anyhow::Result<(Channel, Channel)> {
    let [client, server] = super::agents(["sender", "receiver"])?;
    let (near, far) = UnixStream::pair().context("a socket pair")?;
    let accepting = thread::spawn(move || server.accept_blocking(&mut Pipe(far)));
    let dialled = client.dial_blocking(&mut Pipe(near), Expected::AnyAgent)?;
    let accepted = accepting.join().map_err(|_| anyhow!("the handshake panicked"))??;
    Ok((dialled, accepted))
}

/// A socket below the handshake.
struct Pipe(UnixStream);

impl Wire for Pipe {
    type Error = TlsError;

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        Ok(self.0.read(into)?)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), TlsError> {
        Ok(self.0.write_all(bytes)?)
    }
}
