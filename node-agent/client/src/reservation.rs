//! A slot of the arena that is being filled.
//!
//! The checksum of an object is computed from the engine's bytes during the copy, before other processes can
//! reach them in the arena. It travels on the socket. A dropped reservation is released.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use reprise_buffers::{Access, BufferError, PAGE_BYTES, Span};
use reprise_policy::layout::OBJECTS_MAX;
use reprise_proto::local;

use crate::client::Session;
use crate::connection::Releasable;
use crate::error::ClientError;

/// Number of words in the bitmap of filled objects.
const FILLED_WORDS: usize = (OBJECTS_MAX as usize).div_ceil(u64::BITS as usize);

/// A slot to fill. Dropping it releases it.
#[derive(Debug)]
pub struct Reservation {
    session: Arc<Session>,
    lease: u64,
    span: Span,
    checksums: Box<[u32]>,
    filled: [u64; FILLED_WORDS],
    state: State,
}

/// Owner of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The reservation owns the slot.
    Reserved,
    /// The agent, after a commit.
    Committed,
}

impl Reservation {
    /// Returns the slot's memory, as long as a block's payload. An engine whose device writes the memory
    /// calls [`Reservation::checksum_written`] afterwards.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Copies one object into the slot and computes its checksum during the copy.
    ///
    /// # Errors
    /// `BadRequest` when the object does not exist or its length is not the layout's.
    pub fn fill_object(&mut self, object: u32, bytes: &[u8]) -> Result<(), ClientError> {
        let layout = self.session.layout();
        if object >= layout.objects() || bytes.len() as u64 != layout.object_bytes() {
            return Err(ClientError::BadRequest(format!(
                "invalid object {object} of {} bytes: a block has {} objects of {} bytes",
                bytes.len(),
                layout.objects(),
                layout.object_bytes()
            )));
        }
        let checksum =
            self.object_span(object).and_then(|span| span.copy_in_checked(bytes)).map_err(fill_error)?;
        self.note(object, checksum);
        Ok(())
    }

    /// Copies a whole block, given as its objects in order.
    ///
    /// # Errors
    /// `BadRequest` when count or length of the objects is not the layout's.
    pub fn fill_from(&mut self, objects: &[&[u8]]) -> Result<(), ClientError> {
        let expected = self.session.layout().objects();
        if objects.len() as u64 != u64::from(expected) {
            return Err(ClientError::BadRequest(format!(
                "invalid number of objects {}: a block has {expected}",
                objects.len()
            )));
        }
        (0..expected).zip(objects).try_for_each(|(object, bytes)| self.fill_object(object, bytes))
    }

    /// Computes the checksums of a block that was written into [`Reservation::span`] by other means.
    ///
    /// # Errors
    /// `Memory`, which indicates a bug of this library.
    pub fn checksum_written(&mut self) -> Result<(), ClientError> {
        for object in 0..self.session.layout().objects() {
            let checksum = self.object_span(object).map_err(fill_error)?.crc32c();
            self.note(object, checksum);
        }
        Ok(())
    }

    pub(crate) fn lease(&self) -> u64 {
        self.lease
    }

    /// Returns the objects' checksums in wire format.
    ///
    /// # Errors
    /// `BadRequest` when an object was not filled.
    pub(crate) fn packed_checksums(&self) -> Result<Bytes, ClientError> {
        let missing = (0..self.session.layout().objects()).find(|object| !self.is_filled(*object));
        if let Some(object) = missing {
            return Err(ClientError::BadRequest(format!(
                "object {object} of a reservation was not filled: fill all objects before the commit"
            )));
        }
        let mut packed = BytesMut::with_capacity(self.checksums.len() * 4);
        self.checksums.iter().for_each(|checksum| packed.extend_from_slice(&checksum.to_le_bytes()));
        Ok(packed.freeze())
    }

    /// Transfers the slot to the agent.
    pub(crate) fn mark_committed(mut self) {
        self.state = State::Committed;
    }

    fn object_span(&self, object: u32) -> Result<Span, BufferError> {
        // Cannot overflow: a block has at most 128 MiB.
        let bytes = self.session.layout().object_bytes() as usize;
        self.span.slice(object as usize * bytes, bytes)
    }

    fn note(&mut self, object: u32, checksum: u32) {
        self.checksums[object as usize] = checksum;
        self.filled[(object / u64::BITS) as usize] |= 1 << (object % u64::BITS);
    }

    fn is_filled(&self, object: u32) -> bool {
        self.filled[(object / u64::BITS) as usize] & (1 << (object % u64::BITS)) != 0
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.state == State::Reserved {
            self.session.connection().release_each(Releasable::Leases, [self.lease]);
        }
    }
}

/// Decodes the reservations of an answer. Zeroes the padding behind each payload: the padding reaches the
/// device, and must not contain data of the slot's previous block.
///
/// # Errors
/// `Protocol` when a place lies in no writable region.
pub(crate) fn reservations(
    session: &Arc<Session>,
    reserved: &local::Reserved,
) -> Result<Vec<Reservation>, ClientError> {
    let layout = session.layout();
    let places = reserved.leases.iter().map(|lease| lease.place.as_ref());
    let spans = session.connection().regions().spans(places, layout.slot_bytes(), Access::ReadWrite)?;
    let payload_bytes = layout.block_bytes() as usize;
    let padding_bytes = (layout.slot_bytes() - layout.block_bytes()) as usize;
    let zeroes = [0; PAGE_BYTES];
    let reservation = |(lease, span): (&local::Lease, Option<Span>)| {
        let span = span.ok_or_else(|| ClientError::Protocol("lease without a place".into()))?;
        span.slice(payload_bytes, padding_bytes)
            .and_then(|padding| padding.copy_in(&zeroes[..padding_bytes]))
            .map_err(fill_error)?;
        Ok(Reservation {
            session: Arc::clone(session),
            lease: lease.lease,
            span: span.slice(0, payload_bytes).map_err(fill_error)?,
            checksums: vec![0; layout.objects() as usize].into(),
            filled: [0; FILLED_WORDS],
            state: State::Reserved,
        })
    };
    reserved.leases.iter().zip(spans).map(reservation).collect()
}

fn fill_error(source: BufferError) -> ClientError {
    ClientError::Memory { context: "fill a reserved slot", source }
}
