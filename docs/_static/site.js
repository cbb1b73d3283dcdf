// A figure of eleven inches is small on a phone: a touch opens the picture itself.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll(".cell_output img")) {
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "Open the figure";
    image.replaceWith(link);
    link.append(image);
  }
});
