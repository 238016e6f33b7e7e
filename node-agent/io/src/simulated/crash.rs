//! Contents of the medium after a crash.

use crate::simulated::image::Image;
use crate::simulated::random::Random;

/// Kind of a simulated crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashMode {
    /// The process was killed: completed writes survive; each write in flight survives whole, torn, or not at
    /// all.
    ProcessKilled,
    /// Power was lost: each unsynced write survives whole, torn, or not at all, in any order.
    PowerLost,
    /// Power was lost and with it every unsynced write: the worst case.
    UnsyncedDropped,
}

/// Bytes that reached the device and are not durable.
#[derive(Clone, Debug)]
pub(crate) struct UnsyncedWrite {
    pub(crate) offset: u64,
    pub(crate) data: Vec<u8>,
}

/// Applies to `image` the surviving part of `writes`: each a third whole, torn or not at all, in random
/// order.
pub(crate) fn survive(image: &mut Image, mut writes: Vec<UnsyncedWrite>, sector: usize, random: &mut Random) {
    random.shuffle(&mut writes);
    for write in writes {
        match random.below(3) {
            0 => {}
            1 => image.write(write.offset, &write.data),
            _ => tear(&write, sector, random).iter().for_each(|piece| image.write(piece.offset, &piece.data)),
        }
    }
}

/// Returns the surviving sectors of a write, each with probability 1/2.
pub(crate) fn tear(write: &UnsyncedWrite, sector: usize, random: &mut Random) -> Vec<UnsyncedWrite> {
    let sectors = write.data.chunks(sector).zip((write.offset..).step_by(sector));
    let kept = sectors.filter(|_| random.one_in(2));
    kept.map(|(data, offset)| UnsyncedWrite { offset, data: data.to_vec() }).collect()
}
