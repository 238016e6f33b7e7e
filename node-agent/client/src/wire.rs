//! Frames: a little-endian `u32` length, then one message.
//!
//! Received payloads become [`Bytes`], so that fields of a decoded message (checksums of a load) are slices
//! of the frame instead of copies. A small frame is copied out of the receive buffer; a frame that does not
//! fit gets its own allocation. No allocation is larger than [`FRAME_BYTES_MAX`].

use bytes::Bytes;
use reprise_proto::local::{FRAME_BYTES_MAX, Request};

use prost::Message;

use crate::error::ClientError;

/// Size of a frame's length field in bytes.
pub(crate) const LENGTH_BYTES: usize = 4;

/// Size of one receive call: most answers and several notices fit.
const RECEIVE_BYTES: usize = 64 << 10;

/// Appends a request as one frame.
///
/// # Errors
/// `BadRequest` when the message would exceed the frame limit; `out` is then unchanged.
pub(crate) fn append_frame(request: &Request, out: &mut Vec<u8>) -> Result<(), ClientError> {
    let length = request.encoded_len();
    if length > FRAME_BYTES_MAX {
        return Err(ClientError::BadRequest(format!(
            "a message of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}: pass fewer blocks per call"
        )));
    }
    out.reserve(LENGTH_BYTES + length);
    out.extend_from_slice(&(length as u32).to_le_bytes());
    request.encode_raw(out);
    Ok(())
}

/// Splits a stream of bytes into frames.
#[derive(Debug)]
pub(crate) struct FrameReader {
    buffer: Box<[u8]>,
    /// Range of received bytes in `buffer` that belong to no frame yet: `start..end`.
    start: usize,
    end: usize,
    /// A frame that is received into its own allocation; `buffer` is empty meanwhile.
    large: Option<LargeFrame>,
}

#[derive(Debug)]
struct LargeFrame {
    bytes: Vec<u8>,
    filled: usize,
}

impl FrameReader {
    pub(crate) fn new() -> FrameReader {
        FrameReader { buffer: vec![0; RECEIVE_BYTES].into(), start: 0, end: 0, large: None }
    }

    /// Returns the memory for the next bytes of the stream; never empty. Call it after
    /// [`FrameReader::next_frame`] returned `None`.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        if let Some(large) = &mut self.large {
            return &mut large.bytes[large.filled..];
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.buffer[self.end..]
    }

    /// Notes that `count` bytes were written to [`FrameReader::space`].
    pub(crate) fn received(&mut self, count: usize) {
        match &mut self.large {
            Some(large) => large.filled += count,
            None => self.end += count,
        }
    }

    /// Returns the next complete frame, if there is one.
    ///
    /// # Errors
    /// `Protocol` when the stream announces a frame that is too long.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Bytes>, ClientError> {
        if let Some(large) = self.large.take_if(|large| large.filled == large.bytes.len()) {
            return Ok(Some(Bytes::from(large.bytes)));
        }
        let received = &self.buffer[self.start..self.end];
        let Some((length, rest)) = received.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(ClientError::Protocol(format!(
                "a frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}"
            )));
        }
        if let Some(frame) = rest.get(..length) {
            let frame = Bytes::copy_from_slice(frame);
            self.start += LENGTH_BYTES + length;
            return Ok(Some(frame));
        }
        if LENGTH_BYTES + length > self.buffer.len() {
            let filled = rest.len();
            let mut bytes = vec![0; length];
            bytes[..filled].copy_from_slice(rest);
            self.large = Some(LargeFrame { bytes, filled });
            (self.start, self.end) = (0, 0);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds a stream in steps of the given sizes and collects the frames.
    fn cut(stream: &[u8], steps: &[usize]) -> Result<Vec<Bytes>, ClientError> {
        let mut reader = FrameReader::new();
        let mut frames = Vec::new();
        let mut steps = steps.iter().copied().cycle();
        let mut rest = stream;
        loop {
            while let Some(frame) = reader.next_frame()? {
                frames.push(frame);
            }
            if rest.is_empty() {
                return Ok(frames);
            }
            let space = reader.space();
            let count = steps.next().unwrap_or(1).min(space.len()).min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            reader.received(count);
            rest = &rest[count..];
        }
    }

    proptest! {
        #[test]
        fn frames_survive_any_segmentation_of_the_stream(
            lengths in prop::collection::vec(prop_oneof![0..64usize, Just(RECEIVE_BYTES - 4), 60_000..200_000usize], 0..6),
            steps in prop::collection::vec(prop_oneof![1..9usize, 1..100_000usize], 1..8),
        ) {
            let payloads: Vec<Vec<u8>> =
                lengths.iter().enumerate().map(|(index, length)| vec![index as u8 + 1; *length]).collect();
            let mut stream = Vec::new();
            for payload in &payloads {
                stream.extend_from_slice(&(payload.len() as u32).to_le_bytes());
                stream.extend_from_slice(payload);
            }
            prop_assert_eq!(cut(&stream, &steps).expect("well-formed"), payloads);
        }
    }

    #[test]
    fn rejects_a_too_long_frame_before_receiving_it() {
        let stream = (FRAME_BYTES_MAX as u32 + 1).to_le_bytes();
        assert!(matches!(cut(&stream, &[4]), Err(ClientError::Protocol(_))));
    }
}
