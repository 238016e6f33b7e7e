//! Chunks of lists: the memory behind [`super::lists`].
//!
//! A list of blocks is a list of chunks, each of which holds up to [`CHUNK_BLOCKS`] blocks in order. So a chunk states
//! which blocks are due next before their records are read. With links from block to block, each step of an eviction
//! would wait for one cache miss; with chunks, the processor waits for those of a whole chunk at once.
//!
//! A chunk is one cache line. Its places are used from the first one on, without gaps.

use super::lists::NIL;

/// Blocks of a chunk: two links and 14 indices are 64 bytes.
pub(super) const CHUNK_BLOCKS: usize = 14;

/// Part of a list.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Chunk {
    /// Neighbours in the list; `newer` is the next free chunk in a chunk that is free.
    pub(super) older: u32,
    pub(super) newer: u32,
    /// Blocks, oldest first; `NIL` behind the last one.
    blocks: [u32; CHUNK_BLOCKS],
}

const _: () = assert!(size_of::<Chunk>() == 64, "a chunk is one cache line");

/// All chunks, and those of them that are free.
#[derive(Debug)]
pub(super) struct Chunks {
    all: Vec<Chunk>,
    free: u32,
}

/// Ends of a list of chunks; both `NIL` if it is empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Chunk {
    /// Number of blocks in the chunk.
    pub(super) fn len(&self) -> usize {
        // Index `CHUNK_BLOCKS` is the end of a full chunk.
        (self.places_of(NIL) | 1 << CHUNK_BLOCKS).trailing_zeros() as usize
    }

    /// Places that hold a number, as bits. Without branches, so that it becomes a few vector instructions.
    fn places_of(&self, number: u32) -> u32 {
        (0..).zip(&self.blocks).fold(0, |places, (at, block)| places | u32::from(*block == number) << at)
    }

    pub(super) fn is_full(&self) -> bool {
        self.blocks[CHUNK_BLOCKS - 1] != NIL
    }

    /// Blocks in order, oldest first.
    pub(super) fn blocks(&self) -> &[u32] {
        &self.blocks[..self.len()]
    }

    /// Oldest block; `NIL` in an empty chunk.
    pub(super) fn oldest(&self) -> u32 {
        self.blocks[0]
    }

    /// Place of a block that is in the chunk.
    pub(super) fn place(&self, block: u32) -> usize {
        let place = self.places_of(block).trailing_zeros() as usize;
        assert!(place < CHUNK_BLOCKS, "block {block} is not in the chunk of its record");
        place
    }

    /// Block after a place.
    pub(super) fn after(&self, place: usize) -> Option<u32> {
        self.blocks.get(place + 1).copied().filter(|block| *block != NIL)
    }

    /// Inserts a block at a place, before the block that is there. The chunk must not be full.
    pub(super) fn insert(&mut self, place: usize, block: u32) {
        debug_assert!(!self.is_full() && place <= self.len(), "no room at place {place}");
        if self.blocks[place] != NIL {
            self.blocks.copy_within(place..CHUNK_BLOCKS - 1, place + 1);
        }
        self.blocks[place] = block;
    }

    /// Removes the block at a place.
    pub(super) fn remove(&mut self, place: usize) {
        match place {
            // The next victim, most often: the length is known when the program is compiled.
            0 => self.blocks.copy_within(1.., 0),
            _ if self.after(place).is_some() => self.blocks.copy_within(place + 1.., place),
            _ => self.blocks[place] = NIL,
        }
        self.blocks[CHUNK_BLOCKS - 1] = NIL;
    }

    /// Removes and returns the blocks from a place on.
    fn split_off(&mut self, place: usize) -> [u32; CHUNK_BLOCKS] {
        let mut rest = [NIL; CHUNK_BLOCKS];
        rest[..CHUNK_BLOCKS - place].copy_from_slice(&self.blocks[place..]);
        self.blocks[place..].fill(NIL);
        rest
    }
}

impl Chunks {
    pub(super) fn new() -> Chunks {
        Chunks { all: Vec::new(), free: NIL }
    }

    /// Bytes of all chunks, without spare capacity.
    pub(super) fn bytes(&self) -> usize {
        self.all.len() * size_of::<Chunk>()
    }

    pub(super) fn get(&self, chunk: u32) -> &Chunk {
        &self.all[chunk as usize]
    }

    pub(super) fn get_mut(&mut self, chunk: u32) -> &mut Chunk {
        &mut self.all[chunk as usize]
    }

    /// Adds an empty chunk to a list, between neighbours or, where one is `NIL`, at that end; returns it.
    pub(super) fn add(&mut self, ends: &mut Ends, (older, newer): (u32, u32)) -> u32 {
        let new = Chunk { older, newer, blocks: [NIL; CHUNK_BLOCKS] };
        let chunk = if self.free == NIL {
            self.all.push(new);
            (self.all.len() - 1) as u32
        } else {
            let chunk = self.free;
            self.free = std::mem::replace(self.get_mut(chunk), new).newer;
            chunk
        };
        self.join_neighbours(ends, (older, newer), (chunk, chunk));
        chunk
    }

    /// Links the neighbours of a place in a list, or its ends, to the chunks there.
    fn join_neighbours(&mut self, ends: &mut Ends, (older, newer): (u32, u32), (first, last): (u32, u32)) {
        match older {
            NIL => ends.oldest = first,
            _ => self.get_mut(older).newer = first,
        }
        match newer {
            NIL => ends.newest = last,
            _ => self.get_mut(newer).older = last,
        }
    }

    /// Removes a chunk from its list.
    pub(super) fn remove(&mut self, ends: &mut Ends, chunk: u32) {
        let Chunk { older, newer, .. } = *self.get(chunk);
        self.join_neighbours(ends, (older, newer), (newer, older));
        self.get_mut(chunk).newer = std::mem::replace(&mut self.free, chunk);
    }

    /// Makes a chunk the newest of its list.
    pub(super) fn renew(&mut self, ends: &mut Ends, chunk: u32) {
        let Chunk { older, newer, .. } = *self.get(chunk);
        if newer == NIL {
            return;
        }
        self.join_neighbours(ends, (older, newer), (newer, older));
        let newest = ends.newest;
        self.join_neighbours(ends, (newest, NIL), (chunk, chunk));
        let moved = self.get_mut(chunk);
        (moved.older, moved.newer) = (newest, NIL);
    }

    /// Moves the blocks of a chunk from a place on to a new chunk behind it; returns that.
    pub(super) fn split(&mut self, ends: &mut Ends, chunk: u32, place: usize) -> u32 {
        let newer = self.get(chunk).newer;
        let new = self.add(ends, (chunk, newer));
        let rest = self.get_mut(chunk).split_off(place);
        self.get_mut(new).blocks = rest;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_keeps_its_order_over_insertions_and_removals() {
        let mut chunk = Chunk { older: NIL, newer: NIL, blocks: [NIL; CHUNK_BLOCKS] };
        let mut model = Vec::new();
        for block in 0..CHUNK_BLOCKS as u32 {
            let place = block as usize * 5 % (model.len() + 1);
            chunk.insert(place, block);
            model.insert(place, block);
            assert_eq!(chunk.blocks(), model);
        }
        assert!(chunk.is_full());
        while let Some(block) = model.get(model.len() / 3).copied() {
            let place = chunk.place(block);
            assert_eq!(chunk.after(place), model.get(place + 1).copied());
            chunk.remove(place);
            model.remove(place);
            assert_eq!((chunk.blocks(), chunk.len()), (&model[..], model.len()));
        }
    }

    #[test]
    fn free_chunks_are_used_again() {
        let mut chunks = Chunks::new();
        let mut ends = Ends { oldest: NIL, newest: NIL };
        let first = chunks.add(&mut ends, (NIL, NIL));
        let second = chunks.add(&mut ends, (first, NIL));
        chunks.remove(&mut ends, first);
        assert_eq!((ends.oldest, ends.newest), (second, second));
        assert_eq!(chunks.add(&mut ends, (second, NIL)), first);
        assert_eq!((chunks.bytes(), ends.newest), (2 * 64, first));
    }
}
