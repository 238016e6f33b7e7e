//! Contents of an emulated namespace.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Contents of a namespace.
#[derive(Debug)]
pub enum Storage {
    /// In memory.
    Memory(Vec<u8>),
    /// In memory, with a volatile cache: a flush or a shutdown makes writes durable.
    Volatile {
        /// Contents that survive a power loss.
        durable: Vec<u8>,
        /// Contents that are read.
        current: Vec<u8>,
    },
    /// In a file, through the page cache.
    File {
        /// The file, open for reading and writing.
        file: File,
        /// Size in bytes.
        bytes: u64,
    },
}

impl Storage {
    /// Returns a namespace of zeroes in memory.
    pub fn memory(bytes: usize) -> Storage {
        Storage::Memory(vec![0; bytes])
    }

    /// Returns a namespace of zeroes with a volatile cache.
    pub fn volatile(bytes: usize) -> Storage {
        Storage::Volatile { durable: vec![0; bytes], current: vec![0; bytes] }
    }

    /// Uses a file with its present size.
    ///
    /// # Errors
    /// The system's error.
    pub fn file(file: File) -> io::Result<Storage> {
        let bytes = file.metadata()?.len();
        Ok(Storage::File { file, bytes })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Storage::Memory(all) | Storage::Volatile { current: all, .. } => all.len() as u64,
            Storage::File { bytes, .. } => *bytes,
        }
    }

    /// Passes bytes to a function, which gets them in one piece.
    pub(super) fn read(
        &self,
        at: u64,
        bytes: usize,
        scratch: &mut Vec<u8>,
        take: impl FnOnce(&[u8]) -> bool,
    ) -> io::Result<bool> {
        match self {
            Storage::Memory(all) | Storage::Volatile { current: all, .. } => {
                Ok(take(&all[at as usize..at as usize + bytes]))
            }
            Storage::File { file, .. } => {
                scratch.resize(bytes, 0);
                file.read_exact_at(scratch, at)?;
                Ok(take(scratch))
            }
        }
    }

    /// Lets a function fill bytes.
    pub(super) fn write(
        &mut self,
        at: u64,
        bytes: usize,
        scratch: &mut Vec<u8>,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> io::Result<bool> {
        match self {
            Storage::Memory(all) | Storage::Volatile { current: all, .. } => {
                Ok(fill(&mut all[at as usize..at as usize + bytes]))
            }
            Storage::File { file, .. } => {
                scratch.resize(bytes, 0);
                if !fill(scratch) {
                    return Ok(false);
                }
                file.write_all_at(scratch, at)?;
                Ok(true)
            }
        }
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        match self {
            Storage::Memory(_) => Ok(()),
            Storage::Volatile { durable, current } => {
                durable.copy_from_slice(current);
                Ok(())
            }
            Storage::File { file, .. } => file.sync_data(),
        }
    }
}
